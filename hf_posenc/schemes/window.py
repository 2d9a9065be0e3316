"""Windows and sparse patterns of keys, with the model's own positions (Longformer, BigBird)."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.effects import Geometry
from ..core.patterns import Banded, Pattern, Scattered
from ..errors import PosencError
from .base import register_scheme
from .pattern import VisibleScheme

MOST_DRAWN = 1024
"""The largest number of random blocks for each block of queries; BigBird draws 3."""


@register_scheme
@dataclass(frozen=True, kw_only=True)
class Window(VisibleScheme):
    """Sees only keys closer than `window`, on both sides on encoders. It defaults to the trained length."""

    name = "window"
    summary = "the model's own positions, near keys only"
    example = {"window": 6}

    window: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_count("window")

    def pattern(self, geometry: Geometry) -> Pattern:
        window = self.window or geometry.trained_length
        return Banded(causal=geometry.causal, window=window)


@register_scheme
@dataclass(frozen=True, kw_only=True)
class Sparse(VisibleScheme):
    """Sees near keys, and some others: global tokens at the start, every `stride`-th key, random blocks.

    Global tokens are seen by all queries and, on encoders, see all keys. Each block of `block` queries draws
    `random_blocks` blocks of keys, which depend on `seed` and not on the length of the text.
    """

    name = "sparse"
    summary = "the model's own positions, near, global, strided and random keys"
    example = {"window": 4, "global_tokens": 1, "stride": 5}

    window: int | None = None
    global_tokens: int = 1
    stride: int | None = None
    random_blocks: int = 0
    block: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_count("window", "stride", "block")
        self._check_seed("seed")
        self._check_seed("global_tokens")
        self._check_seed("random_blocks")
        if self.random_blocks > MOST_DRAWN:
            raise PosencError(
                f"random_blocks={self.random_blocks} is more than {MOST_DRAWN}: each is drawn in every pass. "
                "Give fewer, or a larger block=."
            )

    def pattern(self, geometry: Geometry) -> Pattern:
        return Scattered(
            causal=geometry.causal,
            window=self.window or max(geometry.trained_length // 4, 1),
            global_tokens=self.global_tokens,
            stride=self.stride,
            random_blocks=self.random_blocks,
            block=self.block,
            seed=self.seed,
        )
