"""`Call`, the positions of one attention call, and how a cache keeps keys rotated for it.

`positions.py` makes a `Call` before each attention layer, a cache layer completes it, and attention reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

Angles = tuple[Tensor, Tensor]
"""cos and sin, (batch, tokens, pairs)."""


class Turn(NamedTuple):
    """A rotation of keys as plain tensors and numbers, for a custom operation in a compiled graph."""

    at: Tensor
    """The positions to which keys are rotated, (batch or 1, keys)."""
    inv_freq: Tensor
    """The frequencies, (pairs,) or (batch or 1, 1, pairs)."""
    scaling: float
    layout: str


class Reading(NamedTuple):
    """How keys are rotated when attention reads them. A cache may keep the result beside the unrotated keys."""

    by: Any
    """Identifies the rotation, compared with `==`: keys that another scheme has rotated are not used."""
    derive: Callable[[Tensor, Tensor], Tensor]
    """Rotates keys, given their positions."""
    turn: Callable[[Tensor], Turn]
    """The same rotation as a `Turn`, for keys at these positions."""
    stage: Tensor | None = None
    """The stage of each row, (batch,), for a rotation that follows the length; otherwise None."""


@dataclass(eq=False)
class Call:
    """The positions of queries and keys in an attention call. A cache layer completes it when it gets the new keys."""

    query: Tensor
    """Positions of the queries, (batch or 1, queries)."""
    keys: Tensor
    """Positions of the keys, (batch or 1, keys). For empty slots of a static cache the values mean nothing."""
    first_query: int | None
    """The slot of the key that belongs to the first query; None for a static cache, where only the device knows."""
    angles: tuple[Angles, Angles] | None = None
    """The angles of the queries and of the new keys; None if keys are rotated by zone or by several stages."""
    stage: Tensor | None = None
    """The stage of the queries, (batch or 1,), if a rotation follows the length and all queries of a row share it."""
    rotate_keys: Callable[[Tensor], Tensor] | None = None
    """Rotates new keys before they are cached."""
    tracked: Tensor | None = None
    """Positions of the new keys that the cache must store; None if they are not needed later."""
    gates: Tensor | None = None
    """The gates of tokens, computed from hidden states (`ContentBias`), (batch, heads, keys): those of the new tokens,
    to which the cache adds those that it holds."""
    sizes: tuple[int, int] | None = None
    """How many first and how many recent tokens a cache of fixed size keeps."""
    reading: Reading | None = None
    stored: Tensor | None = None
    """The keys that the cache returned."""
    read: Tensor | None = None
    """The same keys rotated by `reading`, if the cache keeps them."""

    def key(self, length: int) -> Tensor:
        return self.keys[:, :length]

    def keys_read(self, key: Tensor) -> Tensor | None:
        """The rotated keys that the cache keeps; None if `key` is not the tensor that the cache returned."""
        return self.read if key is self.stored else None

    def without_gaps(self, masked: bool) -> bool:
        """Whether slots give all distances: positions rise by one, except in left padding that a mask hides."""
        if torch.compiler.is_compiling() or self.first_query is None:
            return False
        steps = self.keys.diff(dim=-1)
        if not masked:
            return bool((steps == 1).all())
        rising = (steps.diff(dim=-1) >= 0).all()
        return bool(((steps == 0) | (steps == 1)).all() & rising)
