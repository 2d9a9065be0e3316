"""Temperatures: factors for queries that keep attention sharp over texts longer than the trained length.

A factor depends only on n, the number of tokens that the query can see: those up to itself in a decoder, the whole
text in an encoder. So a full pass equals cached decoding, and every attention kernel can be used.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .precision import Fp32Buffers


class Temperature(Fp32Buffers):
    """A factor for each query, from `numbers`. It is a module because it may be trained."""

    def __init__(self, **numbers: float):
        super().__init__()
        self.numbers = numbers

    def factors(self, length: Tensor) -> Tensor:
        """The factors, from the number of tokens that each query can see, in fp32: (rows, queries) -> (rows, heads or
        1, queries)."""
        raise NotImplementedError(f"{type(self).__name__} must define factors(length)")

    def forward(self, length: Tensor) -> Tensor:
        """Callers use this and not `factors`, so that hooks for offloaded or sharded weights run first."""
        return self.factors(length.float())

    @property
    def trains(self) -> bool:
        return any(parameter.requires_grad for parameter in self.parameters())

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={number:g}" for name, number in self.numbers.items())


class ConstantTemperature(Temperature):
    """The same factor for all queries."""

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
