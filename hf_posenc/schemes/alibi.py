"""ALiBi (Press et al. 2021): a penalty on attention scores that grows with distance."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..core.biases import DistanceBias
from ..core.effects import Effect, Geometry
from .base import Scheme, register_scheme


def slopes(num_heads: int, bias_max: float = 8.0) -> tuple[float, ...]:
    """2^(-bias_max*h/n) for h = 1..n. If n is not a power of two: those of the power of two below n, then every second
    slope of twice that many heads."""
    power = 1 << (num_heads.bit_length() - 1)
    regular = [2 ** (-bias_max * h / power) for h in range(1, power + 1)]
    between = [2 ** (-bias_max * h / (2 * power)) for h in range(1, 2 * power + 1, 2)]
    return tuple(regular + between[: num_heads - power])


class LinearBias(DistanceBias):
    """-slope * |distance|, with a slope for each head."""

    slopes: Tensor

    def __init__(self, values: tuple[float, ...], causal: bool):
        super().__init__()
        self.causal = causal
        self.slopes = nn.Buffer(torch.tensor(values), persistent=False)

    def by_distance(self, distances: Tensor) -> Tensor:
        return self.slopes[:, None] * -distances.abs()

    @property
    def key_slopes(self) -> Tensor | None:
        """For keys not after the query: -m(i - j) and m*j differ by -m*i, which the softmax of row i ignores."""
        return self.slopes if self.causal else None

    def extra_repr(self) -> str:
        return f"heads={self.slopes.numel()}, causal={self.causal}"


@register_scheme
@dataclass(frozen=True, kw_only=True)
class Alibi(Scheme):
    """A linear penalty on distance, a slope per head: causal on decoders, symmetric on encoders."""

    name = "alibi"
    keeps = ("ALiBi",)
    summary = "penalty on distance, a slope per head"

    alibi_bias_max: float = 8.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_number("alibi_bias_max", above=0.0)

    def effect(self, geometry: Geometry) -> Effect:
        return Effect(bias=LinearBias(slopes(geometry.num_heads, self.alibi_bias_max), geometry.causal))
