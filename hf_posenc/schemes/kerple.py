"""KERPLE (Chi et al. 2022): a penalty on distance by a kernel whose two numbers are trained for each head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..core.biases import DistanceBias
from ..core.effects import Effect, Geometry
from .base import Scheme, register_scheme

LOG, POWER = "log", "power"
LEAST = 0.01
"""Both numbers are kept at this or above, as the authors' code does; a power is at most 2."""


class KernelBias(DistanceBias):
    """-r1 * ln(1 + r2 * distance), or -r1 * distance^r2."""

    def __init__(self, heads: int, kernel: str, seed: int):
        super().__init__()
        self.kernel = kernel
        generator = torch.Generator().manual_seed(seed)
        most = 1.0 if kernel == LOG else 2.0
        self.r1 = nn.Parameter(2 * torch.rand(heads, generator=generator))
        self.r2 = nn.Parameter(most * torch.rand(heads, generator=generator))

    def by_distance(self, distances: Tensor) -> Tensor:
        r1 = self.r1.clamp(min=LEAST)[:, None]
        if self.kernel == LOG:
            return -r1 * torch.log1p(self.r2.clamp(min=LEAST)[:, None] * distances.abs())
        far = distances.abs().clamp(min=1) ** self.r2.clamp(LEAST, 2.0)[:, None]  # the gradient of 0^r is NaN
        return -r1 * torch.where(distances == 0, 0.0, far)

    def extra_repr(self) -> str:
        return f"heads={self.r1.numel()}, kernel={self.kernel}"


@register_scheme
@dataclass(frozen=True, kw_only=True)
class Kerple(Scheme):
    """A penalty that grows with the logarithm of the distance, or with a power of it. The parameters are new and start
    random, as the authors' do: train them."""

    name = "kerple"
    summary = "learned penalty, logarithm or power of the distance"

    kernel: str = LOG
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choice("kernel", (LOG, POWER))
        self._check_seed("seed")

    def effect(self, geometry: Geometry) -> Effect:
        return Effect(bias=KernelBias(geometry.num_heads, self.kernel, self.seed))
