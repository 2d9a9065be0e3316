"""Position biases: what is added to the attention score of a query and a key.

Subclass `DistanceBias` and override `by_distance` if the bias depends on the distance alone (ALiBi, T5, KERPLE).
Subclass `Bias` and override `between` if it also depends on the query's position (FIRE). All renderings of the bias
(`runtime/renderings.py`) and its gradients follow from that one method.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .precision import Fp32Buffers


class Bias(Fp32Buffers):
    """A number per head for each pair of a query and a key.

    Its parameters and buffers stay in fp32 when the model is cast to half precision, except those named in
    `follows_dtype`.
    """

    of_content: bool = False
    """Whether it is computed from hidden states, one number per key (`ContentBias`)."""
    of_terms: bool = False
    """Whether it depends on the queries and keys themselves (`relative.RelativeTerms`)."""
    of_distance: bool = False
    """Whether it is a function of `key - query` alone."""

    of_factors: bool = False
    """Whether it is made of what queries and what distances give (`FactoredBias`)."""

    @property
    def by_distance_until(self) -> float:
        """The bias is a function of `key - query` alone while all positions are at most this."""
        return math.inf if self.of_distance else -math.inf

    @property
    def key_slopes(self) -> Tensor | None:
        """One slope m per head, if the bias of a key that is not after its query is m * (key position), up to a
        constant per query; otherwise None. Under a causal mask, such a bias is one extra channel of q and k."""
        return None

    def between(self, query: Tensor, key: Tensor) -> Tensor:
        """The bias for queries and keys at these positions: (rows, queries), (rows, keys) -> (rows, heads, queries,
        keys). Positions are floating-point numbers, in the precision in which the bias is to be computed."""
        raise NotImplementedError(f"{type(self).__name__} must define between(query, key)")

    def forward(self, query: Tensor, key: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Callers use this and not `between`, so that hooks for offloaded or sharded weights run first."""
        return self.between(query.to(dtype), key.to(dtype)).to(dtype)

    def numbers(self, distances: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The bias at each distance `key - query`, for a bias of distance: (heads, distances)."""
        found: Tensor = self(distances.new_zeros(1, 1), distances[None], dtype)
        return found[0, :, 0]

    def extra_repr(self) -> str:
        own = [*self.named_parameters(recurse=False), *self.named_buffers(recurse=False)]
        return ", ".join(f"{name}={tuple(tensor.shape)}" for name, tensor in own)


class ContentBias(Bias):
    """A bias that sums gates along the text: for query i and key j, over the tokens after j up to i.

    It needs a causal mask. The softmax of a query ignores a constant, so that one number per key, from the sum up
    to j, is enough.
    """

    of_content = True

    def of_tokens(self, states: Tensor, layer: int) -> Tensor:
        """The gates of tokens with these hidden states: (rows, tokens, channels) -> (rows, heads, tokens). `layer` is
        the layer's index among the patched ones."""
        raise NotImplementedError(f"{type(self).__name__} must define of_tokens(states, layer)")

    def forward(self, states: Tensor, layer: int) -> Tensor:  # type: ignore[override]
        with torch.autocast(states.device.type, enabled=False):  # half precision would round sums over a long text
            return self.of_tokens(states.to(torch.promote_types(states.dtype, torch.float32)), layer)


class DistanceBias(Bias):
    """A bias that depends on the distance alone."""

    of_distance = True

    def by_distance(self, distances: Tensor) -> Tensor:
        """The bias at each of these distances `key - query`: (heads, distances). Distances are whole numbers, given as
        floating-point numbers in the precision in which the bias is to be computed."""
        raise NotImplementedError(f"{type(self).__name__} must define by_distance(distances)")

    def between(self, query: Tensor, key: Tensor) -> Tensor:
        distance = key[:, None, :] - query[:, :, None]
        if query.shape[1] > 1 and not torch.compiler.is_compiling():
            # There are usually far fewer distances than pairs: compute each once and look it up.
            first, last = int(key.min() - query.max()), int(key.max() - query.min())
            if last - first < distance.numel() // 2:
                table = self.by_distance(torch.arange(first, last + 1, device=key.device, dtype=key.dtype))
                return table[:, (distance - first).long()].movedim(0, 1)
        return self.by_distance(distance.flatten()).unflatten(1, distance.shape).movedim(0, 1)


class Bend(NamedTuple):
    """What is added at some distances: outer * inner."""

    start: int
    """The number of the first of them."""
    outer: Tensor
    """(heads,)."""
    inner: Tensor
    """(rows, queries, distances)."""


class Factors(NamedTuple):
    """The bias of some queries at some distances: scale * slope + height, and the bends."""

    scale: Tensor
    """(rows, queries)."""
    slope: Tensor
    """(heads, distances)."""
    height: Tensor
    bends: tuple[Bend, ...] = ()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.scale, self.slope, self.height, *(x for bend in self.bends for x in bend[1:])

    def each(self, change: Callable[[Tensor], Tensor]) -> Factors:
        bends = tuple(Bend(start, change(outer), change(inner)) for start, outer, inner in self.bends)
        return Factors(change(self.scale), change(self.slope), change(self.height), bends)

    def some(self, rows: slice, heads: slice) -> Factors:
        """Of some rows and heads; a single row is that of all."""
        rows = slice(None) if len(self.scale) == 1 else rows
        bends = tuple(Bend(start, outer[heads], inner[rows]) for start, outer, inner in self.bends)
        return Factors(self.scale[rows], self.slope[heads], self.height[heads], bends)


class FactoredBias(Bias):
    """A bias that is made of what the query and what the distance give, each found once instead of for every pair,
    for keys that are not ahead of their query."""

    of_factors = True

    def factors(self, query: Tensor, distances: Tensor) -> Factors:
        """Of queries at these positions, (rows, queries), and of distances that fall; what is below zero is not
        used."""
        raise NotImplementedError(f"{type(self).__name__} must define factors(query, distances)")

    def forward(  # type: ignore[override]
        self, query: Tensor, key: Tensor, dtype: torch.dtype = torch.float32, in_factors: bool = False
    ) -> Tensor | Factors:
        """With `in_factors`, distances stand in the place of keys."""
        if not in_factors:
            return super().forward(query, key, dtype)
        with torch.autocast(query.device.type, enabled=False):
            return self.factors(query.to(dtype), key.to(dtype))
