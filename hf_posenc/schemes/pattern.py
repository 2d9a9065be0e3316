"""Base classes of schemes that change which keys are seen, or at which distances."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..core.effects import Effect, Geometry, LateRotation, OwnTable, Rotation
from ..core.patterns import Pattern
from ..errors import PosencError, UnsupportedCell
from .base import Scheme
from .frequencies import base_frequencies
from .temperature import Log


@dataclass(frozen=True, kw_only=True)
class PatternScheme(Scheme):
    """A scheme with a pattern. `logit_scaling=True` is the old way to write `temperature="log"`."""

    rescales = True

    logit_scaling: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_flag("logit_scaling")
        if not self.logit_scaling:
            return
        if self.temperature not in (None, Log()):
            raise PosencError(
                f"logit_scaling=True means temperature='log', and temperature={self.temperature!r} is given as well: "
                "leave logit_scaling out."
            )
        object.__setattr__(self, "temperature", Log())
        object.__setattr__(self, "logit_scaling", False)

    def options(self) -> dict[str, Any]:
        return {key: value for key, value in super().options().items() if key != "logit_scaling"}

    def pattern(self, geometry: Geometry) -> Pattern:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class TwoPositionScheme(PatternScheme):
    """For models with RoPE: rotates q and k inside attention, with different positions for near and far keys."""

    follows = True
    keeps = ("RoPE",)

    def effect(self, geometry: Geometry) -> Effect:
        if geometry.rope is None:
            raise UnsupportedCell(
                f"{self.name!r} changes the distances by which RoPE rotates, and this model has no RoPE. Use 'window' "
                "or 'sparse'."
            )
        inv_freq, scaling = base_frequencies(geometry)
        rotation = LateRotation(inv_freq=inv_freq, attention_scaling=scaling)
        return Effect(rotation=rotation, pattern=self.pattern(geometry))

    def refuse_encoder(self, geometry: Geometry) -> None:
        if not geometry.causal:
            raise UnsupportedCell(
                f"{self.name!r} needs a causal model, and this one is an encoder. Use 'rerope' or 'self_extend'."
            )


@dataclass(frozen=True, kw_only=True)
class VisibleScheme(PatternScheme):
    """Keeps the model's own positions, and changes only which keys are seen."""

    keeps = ("RoPE", "table", "none")

    def effect(self, geometry: Geometry) -> Effect:
        rotation = None
        if geometry.rope is not None:
            inv_freq, scaling = base_frequencies(geometry)
            rotation = Rotation(inv_freq=inv_freq, attention_scaling=scaling)
        return Effect(table=OwnTable(), rotation=rotation, pattern=self.pattern(geometry))


def round_up(number: float) -> int:
    """`math.ceil`, which ignores rounding errors just above a whole number."""
    return math.ceil(number - 1e-9)
