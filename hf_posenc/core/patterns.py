"""Patterns: which keys a query sees, and at which distances. For schemes that change more than rotary frequencies.

A pattern divides the pairs of queries and keys into zones. Each zone gives queries and keys their own positions, to
which q and k are rotated there. A pair that is in no zone is masked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Zone(NamedTuple):
    """A set of query-key pairs whose positions are mapped in the same way."""

    query: Tensor
    """The mapped positions of the queries, (batch or 1, queries)."""
    key: Tensor
    seen: Tensor
    """Which pairs are in the zone, (batch or 1, queries, keys)."""
    from_cache: bool = False
    """Whether `key` are the positions to which a cache keeps its keys rotated (`Pattern.cached_positions`)."""
    still: bool = False
    """Whether all keys are at position 0, and so need no rotation."""
    most: int | None = None
    """The largest number of keys that a query sees in this zone, if their positions are all different; None if it
    grows with the text."""


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """Makes zones from positions. It holds plain numbers only, because it is compared and copied with the model."""

    causal: bool

    def zones(self, query: Tensor, key: Tensor) -> Iterator[Zone]:
        raise NotImplementedError

    def cached_positions(self, positions: Tensor) -> Tensor | None:
        """The mapped positions of keys for a query that is far away. A cache keeps its keys rotated to these. None if
        no keys are worth keeping so."""
        return None

    def visible(self, query: Tensor, key: Tensor) -> Tensor:
        """Which pairs are in any zone."""
        return torch.stack([zone.seen.expand_as(self._distances(query, key)) for zone in self.zones(query, key)]).any(
            0
        )

    @staticmethod
    def _distances(query: Tensor, key: Tensor) -> Tensor:
        return query[:, :, None] - key[:, None, :]


@dataclass(frozen=True, kw_only=True)
class Far:
    """The map of positions beyond the near zone: a key at p goes to S(p), a query at p to S(p) + offset."""

    divisor: float
    """S(p) = p / divisor; infinity gives S(p) = 0."""
    whole: bool = False
    """Whether S is rounded down."""
    offset: float = 0.0
    capped: bool = False
    """Whether a query at p goes to min(p, offset) instead, which is its position in a full cache of fixed size."""
    first: int | None = None
    """Only keys below this position are seen in the far zone; None for all."""

    @property
    def still(self) -> bool:
        return self.divisor == math.inf

    def key(self, positions: Tensor) -> Tensor:
        if self.still:
            return torch.zeros_like(positions, dtype=torch.float32)
        mapped = positions.float() / self.divisor
        return mapped.floor() if self.whole else mapped

    def query(self, positions: Tensor, side: int = 1) -> Tensor:
        """The mapped positions of queries. `side` is 1 for keys before the query and -1 for keys after it."""
        if self.capped:
            return positions.float().clamp(max=self.offset)
        return self.key(positions) + side * self.offset


@dataclass(frozen=True, kw_only=True)
class Banded(Pattern):
    """Keys closer than `window` at their true distance, the others as `far` says; without `far` they are masked."""

    window: int
    far: Far | None = None

    def zones(self, query: Tensor, key: Tensor) -> Iterator[Zone]:
        apart = self._distances(query, key)
        near = apart.abs() < self.window
        unmoved = self._keeps and self.far is not None and self.far.divisor == 1.0
        most = self.window if self.causal else 2 * self.window - 1
        yield Zone(query, key, near & (apart >= 0) if self.causal else near, unmoved, most=most)
        if self.far is None:
            return
        early = True if self.far.first is None else (key < self.far.first)[:, None, :]
        keys, kind = self.far.key(key), (self._keeps, self.far.still, self.far.first)
        yield Zone(self.far.query(query), keys, (apart >= self.window) & early, *kind)
        if not self.causal:
            yield Zone(self.far.query(query, -1), keys, (apart <= -self.window) & early, *kind)

    @property
    def _keeps(self) -> bool:
        """Whether a cache keeps keys rotated for the far zone. A few first keys are quickly rotated anew."""
        return self.far is not None and self.far.first is None and not self.far.still

    def cached_positions(self, positions: Tensor) -> Tensor | None:
        return self.far.key(positions) if self.far is not None and self._keeps else None


@dataclass(frozen=True, kw_only=True)
class Chunked(Pattern):
    """Dual chunk attention: true distances within a chunk, capped distances to earlier chunks.

    A key is at its position within its chunk. So is a query, for keys of its own chunk; for keys of the chunk before,
    a query is one chunk further, but at most at `reach` - 1; for older keys it is at `reach` - 1.
    """

    chunk: int
    reach: int

    def zones(self, query: Tensor, key: Tensor) -> Iterator[Zone]:
        place, at = query % self.chunk, key % self.chunk
        back = self._distances(query // self.chunk, key // self.chunk)
        yield Zone(place, at, (back == 0) & (self._distances(query, key) >= 0), from_cache=True)
        yield Zone((place + self.chunk).clamp(max=self.reach - 1), at, back == 1, from_cache=True)
        yield Zone(torch.full_like(query, self.reach - 1), at, back > 1, from_cache=True)

    def cached_positions(self, positions: Tensor) -> Tensor | None:
        return positions % self.chunk


@dataclass(frozen=True, kw_only=True)
class Scattered(Pattern):
    """A local window, with global tokens, every `stride`-th key, and randomly drawn blocks of keys."""

    window: int
    global_tokens: int = 0
    stride: int | None = None
    random_blocks: int = 0
    block: int = 64
    seed: int = 0

    def zones(self, query: Tensor, key: Tensor) -> Iterator[Zone]:
        apart = self._distances(query, key)
        seen = apart.abs() < self.window
        if self.global_tokens:
            seen = seen | (key < self.global_tokens)[:, None, :] | (query < self.global_tokens)[:, :, None]
        if self.stride:
            seen = seen | (apart % self.stride == 0)
        if self.random_blocks:
            seen = seen | self._random_blocks(query // self.block, key // self.block)
        most = None
        if self.causal and not self.stride and not self.random_blocks:
            most = self.window + self.global_tokens
        yield Zone(query, key, seen & (apart >= 0) if self.causal else seen, most=most)

    def _random_blocks(self, query: Tensor, key: Tensor) -> Tensor:
        """Which blocks of keys each block of queries draws. A hash decides, so that it does not depend on the length
        of the text."""
        drawn = torch.zeros((len(query), query.shape[1], key.shape[1]), dtype=torch.bool, device=query.device)
        for draw in range(self.random_blocks):
            mixed = (query + 1) * 2654435761 + (draw + 1) * 40503 + (self.seed + 1) * 69069
            mixed = (mixed ^ (mixed >> 15)) * 2246822519 % (1 << 31)
            drawn = drawn | ((mixed % (query + 1))[:, :, None] == key[:, None, :])
        return drawn if self.causal else drawn | self._random_blocks_back(query, key)

    def _random_blocks_back(self, query: Tensor, key: Tensor) -> Tensor:
        """The same pairs with query and key exchanged: on encoders, either of the two may draw the other."""
        one_way = Scattered(causal=True, window=1, random_blocks=self.random_blocks, block=self.block, seed=self.seed)
        return one_way._random_blocks(key, query).transpose(1, 2)
