"""No positions at all."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.effects import Effect, Geometry, ImageEffect
from .base import Scheme, register


@register
@dataclass(frozen=True, kw_only=True)
class NoPositions(Scheme):
    """Every site neutral (NoPE). A decoder still learns order from its causal mask; an encoder sees a bag of words."""

    name = "none"
    keeps = ("none",)
    summary = "no positions; a decoder has its causal mask"

    def effect(self, geometry: Geometry) -> Effect:
        return Effect()

    def on_images(self, geometry: Geometry) -> ImageEffect:
        return ImageEffect()
