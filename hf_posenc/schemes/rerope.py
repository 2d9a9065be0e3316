"""ReRoPE and Leaky ReRoPE (Su 2023): distances that stop growing, or grow slowly, past a window."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..core.effects import Geometry
from ..core.patterns import Banded, Far, Pattern
from ..errors import PosencError
from .base import register_scheme
from .pattern import TwoPositionScheme


@register_scheme
@dataclass(frozen=True, kw_only=True)
class Rerope(TwoPositionScheme):
    """True distances within `window`; all keys beyond it are at distance `window`.

    With a `slope` k a distance d beyond the window counts as window + (d - window)/k (Leaky ReRoPE). `window` defaults
    to half of the trained length. Needs no training. Without a slope the length of the text is not limited.
    """

    name = "rerope"
    summary = "RoPE, distances capped at a window, or growing slowly past it"
    example = {"window": 5}

    window: int | None = None
    slope: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_count("window")
        self._check_number("slope", above=1.0)

    def pattern(self, geometry: Geometry) -> Pattern:
        reach = self.span(geometry)
        window = self.window or max(reach.trained // 2, 1)
        if window >= reach.trained:
            raise PosencError(f"window={window} must be below the trained length {reach.trained}; half is usual.")
        divisor = math.inf if self.slope is None else float(self.slope)
        furthest = window + (reach.target - window) / divisor
        if furthest > reach.trained:
            raise PosencError(
                f"With window={window} and slope={self.slope:g} a key {reach.target} tokens away counts as "
                f"{furthest:g}, past the trained length {reach.trained}: a slope of "
                f"{(reach.target - window) / (reach.trained - window):g} or more does."
            )
        offset = window * (1 - 1 / divisor)
        far = Far(divisor=divisor, offset=offset)
        return Banded(causal=geometry.causal, window=window, far=far)
