"""p-RoPE (Barbero et al. 2024): the slowest pairs do not rotate."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.effects import Effect, Geometry, Rotation
from .base import register_scheme
from .frequencies import proportional_frequencies, rotary_dim
from .rotary import RotaryScheme


@register_scheme
@dataclass(frozen=True, kw_only=True)
class Proportional(RotaryScheme):
    """Rotates only the fastest pairs, a share of `partial_rotary_factor`. `factor` slows these, as in transformers."""

    name = "proportional"
    summary = "RoPE on the fastest pairs only"
    keeps = ()  # a trained model uses the slow pairs that this one stops

    partial_rotary_factor: float = 0.75

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_number("partial_rotary_factor", least=0.0, most=1.0)

    def effect(self, geometry: Geometry) -> Effect:
        theta, portion = self.theta(geometry), float(self.partial_rotary_factor)
        factor = float(self.factor or 1.0)
        parameters = {
            "rope_type": "proportional",
            "rope_theta": theta,
            "partial_rotary_factor": portion,
            "factor": factor,
        }
        inv_freq = proportional_frequencies(rotary_dim(geometry), theta, portion, factor)
        return Effect(rotation=Rotation(inv_freq=inv_freq, rope_parameters=parameters))
