"""STRING (An et al. 2024): far distances are moved down into the range that training has seen most often."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.effects import Geometry
from ..core.patterns import Banded, Far, Pattern
from ..errors import PosencError
from .base import register_scheme
from .pattern import TwoPositionScheme

LOCAL = 128


@register_scheme
@dataclass(frozen=True, kw_only=True)
class String(TwoPositionScheme):
    """Distances of at least `shift` are reduced by `shift` - `window`, so that the furthest distances, which are rare
    in training, are not used.

    For texts within the trained length. Needs no training. The authors use a third of that length as shift (a quarter
    to two fifths works), and a window of 128.
    """

    name = "string"
    summary = "RoPE, far distances moved down into the well trained ones"
    example = {"shift": 9, "window": 3}

    shift: int | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_count("shift", "window")

    def pattern(self, geometry: Geometry) -> Pattern:
        reach = self.span(geometry)
        shift = self.shift or max(reach.trained // 3, 2)
        window = self.window or min(LOCAL, max(shift // 2, 1))
        if window >= shift:
            raise PosencError(f"window={window} must be below shift={shift}, or no distance becomes less.")
        most = reach.trained + shift - window
        if reach.target > most:
            raise PosencError(
                f"With shift={shift} and window={window} distances stay within the trained length {reach.trained} up "
                f"to {most} tokens; {reach.target} were asked for. 'self_extend' and 'rerope' reach further."
            )
        far = Far(divisor=1.0, offset=float(window - shift))
        return Banded(causal=geometry.causal, window=shift, far=far)
