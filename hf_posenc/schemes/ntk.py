"""NTK-aware scaling: a larger theta."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..sites import Geometry
from .base import register
from .frequencies import ntk_frequencies, ntk_theta
from .rotary import RescaledRope


@register
@dataclass(frozen=True, kw_only=True)
class Ntk(RescaledRope):
    """Raises theta so that the slowest pair is slowed by `alpha` (the factor, if not given) and the fastest kept.

    The pairs between are slowed by less than alpha, so that alpha = factor does not quite cover the whole target.
    """

    name = "ntk"
    summary = "RoPE, theta raised once"

    alpha: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_number("alpha", least=1.0)

    def rescaled(self, inv_freq: Sequence[float], factor: float, length: int) -> tuple[float, ...]:
        return ntk_frequencies(inv_freq, self.alpha or factor)

    def words(self, factor: float, length: int, geometry: Geometry) -> dict[str, Any]:
        theta = ntk_theta(self.theta(geometry), self.alpha or factor, geometry.rotary_dim)
        return {"rope_type": "default", "rope_theta": theta}
