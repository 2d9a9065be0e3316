"""Dual chunk attention (An et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.effects import Geometry
from ..core.patterns import Chunked, Pattern
from ..errors import PosencError
from .base import register_scheme
from .pattern import TwoPositionScheme


@register_scheme
@dataclass(frozen=True, kw_only=True)
class Dca(TwoPositionScheme):
    """True distances within a chunk of `chunk` tokens, and distances below the trained length to earlier chunks.

    The nearest `local_window` keys in the chunk before keep their true distance. `chunk` defaults to three quarters of
    the trained length, and `local_window` to the rest of it. Needs no training.
    """

    name = "dca"
    summary = "RoPE, distances counted by chunks of the text"
    example = {"chunk": 7, "local_window": 5}

    chunk: int | None = None
    local_window: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_count("chunk", "local_window")

    def pattern(self, geometry: Geometry) -> Pattern:
        self.refuse_encoder(geometry)
        trained = self.span(geometry).trained
        chunk = self.chunk or (trained - self.local_window if self.local_window else max(3 * trained // 4, 1))
        local = self.local_window or trained - chunk
        if chunk < 1 or local < 1 or chunk + local > trained:
            raise PosencError(
                f"chunk={chunk} and local_window={local} must be 1 or more, and together no more than the trained "
                f"length {trained}; three quarters and one quarter of it are usual."
            )
        return Chunked(causal=True, chunk=chunk, reach=chunk + local)
