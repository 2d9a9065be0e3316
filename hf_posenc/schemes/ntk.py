"""NTK-aware scaling: RoPE with a larger theta."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..core.effects import Effect, Geometry
from ..core.ranges import Range
from ..errors import PosencError
from .base import register_scheme
from .frequencies import covering_alpha, ntk_frequencies, ntk_theta, present_frequencies, refuse_degenerate
from .rotary import RescaledRope


@register_scheme
@dataclass(frozen=True, kw_only=True)
class Ntk(RescaledRope):
    """Raises theta so that the slowest pair is slowed by `alpha` and the fastest not at all.

    `alpha` defaults to the factor, as published. Pairs between are slowed by less, so that the model falls short of
    the target. How far it gets depends on its theta (a LLaMA trained at 256 reaches half of a fourfold target).
    `alpha="cover"` is the smallest alpha that stretches every wave longer than the trained length by the factor.
    """

    name = "ntk"
    summary = "RoPE, theta raised once"

    alpha: float | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.alpha, str):
            if self.alpha != "cover":
                raise PosencError(f"alpha is a number or 'cover', got {self.alpha!r}.")
        else:
            self._check_number("alpha", least=1.0)

    def effect(self, geometry: Geometry) -> Effect:
        refuse_degenerate(geometry)
        return super().effect(geometry)

    def ranges(self, geometry: Geometry) -> dict[str, Range]:
        factor = self.span(geometry).factor or 1.0
        return {"alpha": Range(factor, 16 * factor, log=True)}

    def rescale(self, inv_freq: Sequence[float], factor: float, length: int) -> tuple[float, ...]:
        return ntk_frequencies(inv_freq, self.alpha_for(inv_freq, factor, length))

    def alpha_for(self, inv_freq: Sequence[float], factor: float, length: int) -> float:
        if self.alpha is None:
            return factor
        return covering_alpha(inv_freq, factor, length) if isinstance(self.alpha, str) else float(self.alpha)

    def rope_parameters(self, factor: float, length: int, geometry: Geometry) -> dict[str, Any]:
        plain = {"rope_type": "default", "rope_theta": self.theta(geometry)}
        alpha = self.alpha_for(present_frequencies(plain, geometry.rotary_dim)[0], factor, length)
        return {**plain, "rope_theta": ntk_theta(self.theta(geometry), alpha, geometry.rotary_dim)}
