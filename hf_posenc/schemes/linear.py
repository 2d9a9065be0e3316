"""Linear position interpolation (Chen et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..core.effects import Geometry
from .base import register_scheme
from .frequencies import linear_frequencies
from .rotary import RescaledRope


@register_scheme
@dataclass(frozen=True, kw_only=True)
class Linear(RescaledRope):
    """Divides all positions by `factor`, which brings them into the trained range."""

    name = "linear"
    summary = "RoPE, positions divided by the factor"

    def rescale(self, inv_freq: Sequence[float], factor: float, length: int) -> tuple[float, ...]:
        return linear_frequencies(inv_freq, factor)

    def rope_parameters(self, factor: float, length: int, geometry: Geometry) -> dict[str, Any]:
        return {"rope_type": "linear", "factor": factor}
