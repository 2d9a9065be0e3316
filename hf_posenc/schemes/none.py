"""No positions at all."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.axes import ANY_AXES
from ..core.effects import Effect, Geometry
from .base import Scheme, register_scheme


@register_scheme
@dataclass(frozen=True, kw_only=True)
class NoPositions(Scheme):
    """Removes all positions (NoPE). A decoder can still learn order from its causal mask; an encoder sees a bag of
    words."""

    name = "none"
    keeps = ("none",)
    summary = "no positions; a decoder has its causal mask"
    axes = ANY_AXES

    def effect(self, geometry: Geometry) -> Effect:
        return Effect()
