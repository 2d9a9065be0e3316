"""Dynamic NTK scaling, computed for each query and without state."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.effects import Effect, FollowingRotation, Geometry, Span
from .base import register_scheme, span
from .frequencies import base_frequencies, ntk_weights, refuse_degenerate
from .rotary import RotaryScheme


@register_scheme
@dataclass(frozen=True, kw_only=True)
class DynamicNtk(RotaryScheme):
    """NTK scaling that grows with the length l that a query sees: 1 up to the trained length L, then
    1 + factor*(l/L - 1).

    `factor` is that of transformers' "dynamic" RoPE: 1 stretches by exactly l/L. Past L the scaling changes every
    `step` tokens (default L/16), because a pass over new text rotates all keys once for each step. step=1 changes it
    at every token.
    """

    name = "dynamic_ntk"
    summary = "RoPE, theta follows the length of each row"
    rescales = True
    follows = True
    factor_reaches = False
    nearest = "ntk"

    factor: float | None = 1.0
    step: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_count("step")

    def span(self, geometry: Geometry) -> Span:
        return span(geometry, self.target_length, None)

    def effect(self, geometry: Geometry) -> Effect:
        refuse_degenerate(geometry)
        inv_freq, scaling = base_frequencies(geometry, self.rope_theta)
        length = geometry.trained_length
        return Effect(
            rotation=FollowingRotation(
                inv_freq=inv_freq,
                attention_scaling=scaling,
                weights=ntk_weights(len(inv_freq)),
                border=length,
                step=self.step or max(1, length // 16),
                factor=float(self.factor or 1.0),
            )
        )
