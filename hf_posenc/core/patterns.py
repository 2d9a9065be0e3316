"""Which keys a query sees, and how far away it takes them to be: the maths of schemes that change more than angles.

A pattern divides the pairs of a query and a key into zones. In each zone positions are mapped, those of queries and
those of keys, before q and k are rotated; a pair that is in no zone is not seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Zone(NamedTuple):
    """Pairs that share one map of positions."""

    query: Tensor
    """Where the queries are taken to stand, (batch or 1, queries)."""
    key: Tensor
    seen: Tensor
    """(batch or 1, queries, keys)."""
    from_cache: bool = False
    """Whether `key` is where caches keep their keys rotated to (`Pattern.cached_positions`)."""
    still: bool = False
    """Whether all keys stand at 0: they are not rotated at all."""
    most: int | None = None
    """How many keys a query sees here at most, where no two that it sees stand at the same position; None if that
    grows with the text."""


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """Zones from positions. Plain numbers only: it is compared and copied with the model."""

    causal: bool

    def zones(self, query: Tensor, key: Tensor) -> Iterator[Zone]:
        raise NotImplementedError

    def cached_positions(self, positions: Tensor) -> Tensor | None:
        """Where keys stand as a query far away sees them: caches keep them rotated so, where that is not at 0."""
        return None

    def visible(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether a query may see a key at all, in some zone."""
        return torch.stack([zone.seen.expand_as(self._distances(query, key)) for zone in self.zones(query, key)]).any(
            0
        )

    @staticmethod
    def _distances(query: Tensor, key: Tensor) -> Tensor:
        return query[:, :, None] - key[:, None, :]


@dataclass(frozen=True, kw_only=True)
class Far:
    """How positions are mapped beyond the near zone: key p to S(p), query p to S(p) + offset."""

    divisor: float
    """S(p) = p / divisor; infinite for S = 0."""
    whole: bool = False
    """Whether S is rounded down."""
    offset: float = 0.0
    capped: bool = False
    """Queries stand where they are, up to `offset`: as in a cache that is full there."""
    first: int | None = None
    """Only keys at the first so many positions are seen there; None for all."""

    @property
    def still(self) -> bool:
        return self.divisor == math.inf

    def key(self, positions: Tensor) -> Tensor:
        if self.still:
            return torch.zeros_like(positions, dtype=torch.float32)
        mapped = positions.float() / self.divisor
        return mapped.floor() if self.whole else mapped

    def query(self, positions: Tensor, side: int = 1) -> Tensor:
        """`side`: 1 for keys on the left, -1 for keys on the right."""
        if self.capped:
            return positions.float().clamp(max=self.offset)
        return self.key(positions) + side * self.offset


@dataclass(frozen=True, kw_only=True)
class Banded(Pattern):
    """Keys closer than `window` at their true distance; the others as `far` says, or not at all."""

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
        """A few first keys are rotated anew in no time."""
        return self.far is not None and self.far.first is None and not self.far.still

    def cached_positions(self, positions: Tensor) -> Tensor | None:
        return self.far.key(positions) if self.far is not None and self._keeps else None


@dataclass(frozen=True, kw_only=True)
class Chunked(Pattern):
    """Dual chunk attention: true distances within a chunk, and capped ones to the chunk before and to those before it.

    Keys stand at their place in their chunk. Queries stand at theirs; for keys of the chunk before, one chunk further,
    but not past `reach` - 1; for older keys, at `reach` - 1.
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
    """A local window, and beside it global tokens, every so-manieth key, and blocks of keys drawn at random."""

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
        """The blocks that each block of queries draws: the same for every length of text, since they are hashed."""
        drawn = torch.zeros((len(query), query.shape[1], key.shape[1]), dtype=torch.bool, device=query.device)
        for draw in range(self.random_blocks):
            mixed = (query + 1) * 2654435761 + (draw + 1) * 40503 + (self.seed + 1) * 69069
            mixed = (mixed ^ (mixed >> 15)) * 2246822519 % (1 << 31)
            drawn = drawn | ((mixed % (query + 1))[:, :, None] == key[:, None, :])
        return drawn if self.causal else drawn | self._random_blocks_back(query, key)

    def _random_blocks_back(self, query: Tensor, key: Tensor) -> Tensor:
        """On encoders a pair is seen from both its ends."""
        one_way = Scattered(causal=True, window=1, random_blocks=self.random_blocks, block=self.block, seed=self.seed)
        return one_way._random_blocks(key, query).transpose(1, 2)
