"""Shaw et al. (2018): a vector for each distance, added to keys and optionally to values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..core.effects import Effect, Geometry
from ..core.relative import RelativeTerms, Terms
from .base import Scheme, register_scheme


class DistanceVectors(RelativeTerms):
    """Vectors for distances `key - query` from -most to most, for each layer, shared by its heads."""

    follows_dtype = ("keys", "values")

    def __init__(self, geometry: Geometry, most: int, on_queries: bool, on_values: bool, seed: int):
        super().__init__()
        self.most, self.on_queries = most, on_queries
        shape, generator = (geometry.layers, 2 * most + 1, geometry.head_dim), torch.Generator().manual_seed(seed)

        def new_parameter() -> nn.Parameter:
            return nn.Parameter(geometry.initializer_range * torch.randn(*shape, generator=generator))

        self.keys = new_parameter()
        self.values = new_parameter() if on_values else None

    def terms(self, layer: int, first: int, last: int) -> Terms:
        def rows(distance: Tensor) -> Tensor:
            return distance.clamp(-self.most, self.most) + self.most

        keys = self.keys[layer][None]
        values = None if self.values is None else self.values[layer][None]
        return Terms(rows=rows, keys=keys, queries=keys if self.on_queries else None, values=values, reach=self.most)

    def extra_repr(self) -> str:
        also = [name for name, there in (("queries", self.on_queries), ("values", self.values is not None)) if there]
        return f"layers={len(self.keys)}, distances up to {self.most}, on {' and '.join(['keys', *also])}"


@register_scheme
@dataclass(frozen=True, kw_only=True)
class Shaw(Scheme):
    """A trained vector for each distance up to `max_distance` is added to keys. With `relative_values` another one is
    added to values; with `relative_queries` the vector is also multiplied with keys (BERT's `relative_key_query`). The
    parameters are new and random: train them."""

    name = "shaw"
    summary = "a learned vector per distance, beside keys and values"
    per_layer = True

    max_distance: int = 16
    relative_values: bool = False
    relative_queries: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_count("max_distance")
        self._check_flag("relative_values", "relative_queries")
        self._check_seed("seed")

    def effect(self, geometry: Geometry) -> Effect:
        given = (self.max_distance, self.relative_queries, self.relative_values, self.seed)
        return Effect(bias=DistanceVectors(geometry, *given))
