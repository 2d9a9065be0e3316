"""Temperature: what each query is multiplied by, so that attention stays sharp over more text than was trained on.

It depends on how much text a query can look at, n, and on nothing else: in a decoder up to itself, in an encoder all
of it. So a full pass equals cached decoding, and every kernel serves.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .precision import Fp32Buffers


class Temperature(Fp32Buffers):
    """A factor for each query. A module, since it may be trained; `numbers` are what it is made from."""

    def __init__(self, **numbers: float):
        super().__init__()
        self.numbers = numbers

    def factors(self, length: Tensor) -> Tensor:
        """(rows, queries), how many tokens each can look at, as fp32 -> (rows, heads or 1, queries)."""
        raise NotImplementedError(f"{type(self).__name__} must define factors(length)")

    def forward(self, length: Tensor) -> Tensor:
        """The one way in, so that hooks on the module (of offloaded or sharded weights) run before it."""
        return self.factors(length.float())

    @property
    def trains(self) -> bool:
        return any(parameter.requires_grad for parameter in self.parameters())

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={number:g}" for name, number in self.numbers.items())


class ConstantTemperature(Temperature):
    """The same for all."""

    def __init__(self, factor: float):
        super().__init__(factor=factor)

    def factors(self, length: Tensor) -> Tensor:
        return torch.full_like(length, self.numbers["factor"])[:, None]


class LogTemperature(Temperature):
    """max(1, ln n / ln L): exactly 1 up to L."""

    def __init__(self, length: int):
        super().__init__(length=length)

    def factors(self, length: Tensor) -> Tensor:
        return (length.clamp(min=2).log() / math.log(self.numbers["length"])).clamp(min=1.0)[:, None]


class SteppedTemperature(Temperature):
    """1 + beta * ln(1 + floor((n - before) / step)): exactly 1 for the first `step` tokens."""

    def __init__(self, beta: float, step: int, before: int):
        super().__init__(beta=beta, step=step, before=before)

    def factors(self, length: Tensor) -> Tensor:
        steps = torch.floor((length - self.numbers["before"]).clamp(min=0) / self.numbers["step"])
        return (1 + self.numbers["beta"] * torch.log1p(steps))[:, None]


class LearnedTemperature(Temperature):
    """s * ln n, with a trained s for each head."""

    def __init__(self, heads: int, start: float):
        super().__init__(start=start)
        self.scale = nn.Parameter(torch.full((heads,), start))

    def factors(self, length: Tensor) -> Tensor:
        return self.scale[:, None] * length.clamp(min=1).log()[:, None]
