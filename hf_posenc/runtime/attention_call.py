"""What one attention call knows of positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

Angles = tuple[Tensor, Tensor]
"""cos and sin, (batch, tokens, pairs)."""


class Turn(NamedTuple):
    """A rotation of keys as plain tensors and numbers."""

    at: Tensor
    """Where keys are rotated to, (batch or 1, keys)."""
    inv_freq: Tensor
    """(pairs,), or (batch or 1, 1, pairs)."""
    scaling: float
    layout: str


class Reading(NamedTuple):
    """Keys as attention will read them, which a cache may keep beside the keys as the model made them."""

    by: Any
    """What they are derived by, compared with `==`: what another scheme derived is not read."""
    derive: Callable[[Tensor, Tensor], Tensor]
    """From keys and their positions."""
    turn: Callable[[Tensor], Turn]
    """The same rotation, of keys at these positions."""
    stage: Tensor | None = None
    """(batch,) where they hold for one stage of a rotation that follows the length."""


@dataclass(eq=False)
class Call:
    """Where queries and keys of an attention call stand. A layer of a cache completes it when it gets the new keys."""

    query: Tensor
    """Positions of the queries, (batch or 1, queries)."""
    keys: Tensor
    """Positions of the keys, (batch or 1, keys); slots of a static cache that are still empty hold anything."""
    first_query: int | None
    """Which of the keys stands with the first query; None under a static cache, where only the device knows."""
    angles: tuple[Angles, Angles] | None = None
    """Of the queries and of the new keys; None where keys are rotated by zone or by stage."""
    stage: Tensor | None = None
    """(batch or 1,) of the queries, where a rotation follows the length and they are all in the same."""
    rotate_keys: Callable[[Tensor], Tensor] | None = None
    """What is done to new keys before they are cached."""
    tracked: Tensor | None = None
    """The positions that the cache has to keep beside the new keys, where anyone asks for them later."""
    gates: Tensor | None = None
    """What tokens say of the past by their hidden states, (batch, heads, keys): of the new ones, until a cache adds
    those that it holds."""
    sizes: tuple[int, int] | None = None
    """How many first and how many recent tokens a cache of fixed size keeps."""
    reading: Reading | None = None
    stored: Tensor | None = None
    """The keys that the cache gave back."""
    read: Tensor | None = None
    """The same keys as `reading` derives them, where the cache keeps them."""

    def key(self, length: int) -> Tensor:
        return self.keys[:, :length]

    def keys_read(self, key: Tensor) -> Tensor | None:
        """What the cache keeps for these keys; None if a model has changed them since they came from it."""
        return self.read if key is self.stored else None

    def without_gaps(self, masked: bool) -> bool:
        """Whether slots tell all distances: positions rise by one, but for padding in front, which a mask hides."""
        if torch.compiler.is_compiling() or self.first_query is None:
            return False
        steps = self.keys.diff(dim=-1)
        if not masked:
            return bool((steps == 1).all())
        rising = (steps.diff(dim=-1) >= 0).all()
        return bool(((steps == 0) | (steps == 1)).all() & rising)
