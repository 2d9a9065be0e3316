"""The scaling of Llama 3.1 and later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..core.effects import Geometry
from ..core.ranges import Range
from ..errors import PosencError
from .base import register_scheme
from .frequencies import llama3_frequencies
from .rotary import RescaledRope


@register_scheme
@dataclass(frozen=True, kw_only=True)
class Llama3(RescaledRope):
    """Slows waves longer than the trained length by `factor`, keeps those below a quarter of it, and interpolates
    between."""

    name = "llama3"
    summary = "RoPE, long waves interpolated"

    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_number("low_freq_factor", "high_freq_factor", above=0.0)
        if self.high_freq_factor <= self.low_freq_factor:
            raise PosencError(
                f"high_freq_factor={self.high_freq_factor:g} must be greater than "
                f"low_freq_factor={self.low_freq_factor:g}."
            )

    def ranges(self, geometry: Geometry) -> dict[str, Range]:
        return {"low_freq_factor": Range(0.25, 2.0, log=True), "high_freq_factor": Range(2.5, 16.0, log=True)}

    def rescale(self, inv_freq: Sequence[float], factor: float, length: int) -> tuple[float, ...]:
        return llama3_frequencies(inv_freq, factor, length, self.low_freq_factor, self.high_freq_factor)

    def rope_parameters(self, factor: float, length: int, geometry: Geometry) -> dict[str, Any]:
        return {
            "rope_type": "llama3",
            "factor": factor,
            "original_max_position_embeddings": length,
            "low_freq_factor": float(self.low_freq_factor),
            "high_freq_factor": float(self.high_freq_factor),
        }
