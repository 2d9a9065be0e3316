"""Sandwich (Chi et al. 2022): the inner product of two sinusoidal position vectors, as a bias."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..core.biases import DistanceBias
from ..core.effects import Effect, Geometry
from ..errors import PosencError
from .base import Scheme, register_scheme

BASE = 10_000.0


class CosineBias(DistanceBias):
    """The sum of cos(distance * frequency), divided by 8h/n for head h = 1..n."""

    frequencies: Tensor
    ratios: Tensor

    def __init__(self, heads: int, size: int):
        super().__init__()
        inv_freq = [BASE ** (-2 * k / size) for k in range(size // 2)]
        self.frequencies = nn.Buffer(torch.tensor(inv_freq), persistent=False)
        self.ratios = nn.Buffer(torch.tensor([8 * h / heads for h in range(1, heads + 1)]), persistent=False)

    def by_distance(self, distances: Tensor) -> Tensor:
        total = torch.cos(distances[:, None] * self.frequencies).sum(-1)
        return total / self.ratios[:, None]

    def extra_repr(self) -> str:
        return f"heads={self.ratios.numel()}, size={2 * self.frequencies.numel()}"


@register_scheme
@dataclass(frozen=True, kw_only=True)
class Sandwich(Scheme):
    """The inner product of the sinusoids of two positions, without content. It falls roughly like a logarithm.

    `size` is the number of channels of the sinusoids. It has no parameters, but the model must be trained with it.
    """

    name = "sandwich"
    summary = "inner product of sinusoids as a bias, a scale per head"

    size: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_count("size")
        if self.size % 2 or self.size > 65_536:
            raise PosencError(f"size counts sines and cosines: an even number up to 65536, got {self.size}.")

    def effect(self, geometry: Geometry) -> Effect:
        return Effect(bias=CosineBias(geometry.num_heads, self.size))
