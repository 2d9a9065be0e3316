"""Self-Extend (Jin et al. 2024): far keys share positions in groups."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.effects import Geometry
from ..core.patterns import Banded, Far, Pattern
from ..core.ranges import Range
from ..errors import PosencError
from .base import register_scheme
from .pattern import TwoPositionScheme, round_up


@register_scheme
@dataclass(frozen=True, kw_only=True)
class SelfExtend(TwoPositionScheme):
    """True distances within `window`; beyond it positions are divided by `group` and rounded down.

    `window` defaults to a quarter of the trained length L, and `group` to the smallest that maps the target to two
    thirds of L, which is the authors' rule. Needs no training.
    """

    name = "self_extend"
    summary = "RoPE, far keys in groups that share a position"
    extends = True
    example = {"factor": 4.0, "window": 5}

    window: int | None = None
    group: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_count("window", "group")

    def ranges(self, geometry: Geometry) -> dict[str, Range]:
        reach = self.span(geometry)
        widest, least = max(3 * reach.trained // 4, 2), max(round_up(reach.target / reach.trained), 1)
        return {
            "window": Range(max(reach.trained // 16, 1), widest, log=True, whole=True),
            "group": Range(least, 8 * least, log=True, whole=True),  # smaller ones do not reach the target
        }

    def pattern(self, geometry: Geometry) -> Pattern:
        reach = self.span(geometry)
        window = self.window or max(reach.trained // 4, 1)
        if window >= reach.trained:
            raise PosencError(f"window={window} must be below the trained length {reach.trained}; a quarter is usual.")
        room = 2 * reach.trained / 3 - window
        if self.group is None and room < 1:
            raise PosencError(f"window={window} leaves no room in {reach.trained} tokens; give group= as well.")
        group = self.group or max(round_up((reach.target - window) / room), 1)
        longest = (reach.trained - window) * group + window
        if longest < reach.target:
            least = round_up((reach.target - window) / (reach.trained - window))
            raise PosencError(
                f"window={window} and group={group} reach {longest} tokens, (L - window) * group + window, and "
                f"{reach.target} are wanted: a group of {least} or more does."
            )
        far = Far(divisor=float(group), whole=True, offset=float(window - window // group))
        return Banded(causal=geometry.causal, window=window, far=far)
