"""StreamingLLM (Xiao et al. 2023) and LM-Infinite (Han et al. 2023): only the first and the recent tokens are seen."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..core.effects import Effect, Geometry
from ..core.patterns import Banded, Far, Pattern
from ..errors import PosencError
from .base import register_scheme
from .pattern import TwoPositionScheme


@dataclass(frozen=True, kw_only=True)
class _FirstAndRecent(TwoPositionScheme):
    window: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_count("window")

    def _window(self, geometry: Geometry, first: int) -> int:
        self.refuse_encoder(geometry)
        most = geometry.trained_length - first
        window = self.window or most
        if not 1 <= window <= most:
            raise PosencError(
                f"{first} first tokens and a window of {window} must fit into the trained length "
                f"{geometry.trained_length} together."
            )
        return window


@register_scheme
@dataclass(frozen=True, kw_only=True)
class Streaming(_FirstAndRecent):
    """Sees the first `sinks` and the last `window` tokens, with positions counted within a cache of only these.

    The cache drops all others, so that memory and time per token do not grow with the text. What has left the window
    is forgotten. `window` defaults to the rest of the trained length.
    """

    name = "streaming"
    summary = "RoPE, first and recent tokens only, in a cache of fixed size"
    example = {"sinks": 2, "window": 6}

    sinks: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_count("sinks")

    def pattern(self, geometry: Geometry) -> Pattern:
        window = self._window(geometry, self.sinks)
        far = Far(divisor=1.0, offset=float(self.sinks + window - 1), capped=True, first=self.sinks)
        return Banded(causal=True, window=window, far=far)

    def effect(self, geometry: Geometry) -> Effect:
        made = super().effect(geometry)
        return Effect(rotation=made.rotation, pattern=made.pattern, forgets=True)


@register_scheme
@dataclass(frozen=True, kw_only=True)
class LmInfinite(_FirstAndRecent):
    """Sees the first `global_tokens` and the last `window` tokens; distances are capped at `window`."""

    name = "lm_infinite"
    summary = "RoPE, first and recent tokens only, distances capped"
    example = {"global_tokens": 2, "window": 6}

    global_tokens: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_count("global_tokens")

    def pattern(self, geometry: Geometry) -> Pattern:
        window = self._window(geometry, self.global_tokens)
        far = Far(divisor=math.inf, offset=float(window), first=self.global_tokens)
        return Banded(causal=True, window=window, far=far)
