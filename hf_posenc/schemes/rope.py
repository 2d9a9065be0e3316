"""Plain RoPE."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.effects import Effect, Geometry, Rotation
from .base import register_scheme
from .frequencies import default_frequencies, rotary_dim
from .rotary import RotaryScheme


@register_scheme
@dataclass(frozen=True, kw_only=True)
class Rope(RotaryScheme):
    """Rotates pair i of q and k by position * rope_theta^(-2i/d). A scaling of the model's own RoPE is removed."""

    name = "rope"
    summary = "rotation of q and k, plain"

    def effect(self, geometry: Geometry) -> Effect:
        theta = self.theta(geometry)
        inv_freq = default_frequencies(rotary_dim(geometry), theta)
        parameters = {"rope_type": "default", "rope_theta": theta}
        return Effect(rotation=Rotation(inv_freq=inv_freq, rope_parameters=parameters))
