"""DeBERTa (He et al. 2020, v3 2021): queries times vectors of distances, and keys times vectors of distances."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..core.effects import Effect, Geometry
from ..core.relative import RelativeTerms, Terms
from ..errors import PosencError
from .base import Scheme, register_scheme


def log_bucket(distance: Tensor, buckets: int, most: int) -> Tensor:
    """Signed buckets of distances: half of them hold one distance each, the others are logarithmic up to `most`."""
    middle = buckets // 2
    size = distance.abs().clamp(min=1)
    octaves = torch.log(size.double() / middle) / math.log((most - 1) / middle)
    far = torch.ceil(octaves * (middle - 1)).long() + middle
    return torch.where(size <= middle, distance, distance.sign() * far)


class Disentangled(RelativeTerms):
    """(q k + q K(d) + k Q(-d)) / sqrt(3), where d is the bucket of `query - key`. K and Q are projections, different
    in each layer, of one table with a vector per bucket."""

    follows_dtype = ("table", "to_key", "to_query")

    def __init__(self, geometry: Geometry, buckets: int, most: int, seed: int):
        super().__init__()
        self.buckets, self.most = buckets, most
        layers, heads, size, hidden = geometry.layers, geometry.num_heads, geometry.head_dim, geometry.hidden_size
        generator, std = torch.Generator().manual_seed(seed), geometry.initializer_range

        def new_parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(std * torch.randn(*shape, generator=generator))

        self.table = new_parameter(2 * buckets, hidden)
        self.to_key, self.to_query = (
            new_parameter(layers, heads, size, hidden),
            new_parameter(layers, heads, size, hidden),
        )

    def terms(self, layer: int, first: int, last: int) -> Terms:
        near = torch.arange(-self.most, self.most + 1, device=self.table.device)
        rows = log_bucket(near, self.buckets, self.most).clamp(-self.buckets, self.buckets - 1) + self.buckets

        def of(apart: Tensor) -> Tensor:
            return rows[apart.clamp(-self.most, self.most) + self.most]

        def project(by_head: Tensor) -> Tensor:
            # Not `@`: with a trained factor it multiplies heads in another order, and rounds differently.
            return self.table.expand(len(by_head), -1, -1).bmm(by_head.mT)

        return Terms(
            rows=lambda distance: of(-distance),
            keys=project(self.to_key[layer]),
            queries=project(self.to_query[layer]),
            query_rows=of,
            reach=self.most,
            scale=3**-0.5,
        )

    def extra_repr(self) -> str:
        layers, heads, size, _ = self.to_key.shape
        return f"layers={layers}, heads={heads}, channels={size}, buckets={self.buckets}, distances up to {self.most}"


@register_scheme
@dataclass(frozen=True, kw_only=True)
class Deberta(Scheme):
    """Disentangled attention: a query is multiplied with the vector of a distance, and a key with that of the negative
    distance. Buckets are those of DeBERTa v2. The parameters are new and random: train them."""

    name = "deberta"
    summary = "learned vectors for buckets of distances, against queries and keys"
    per_layer = True

    position_buckets: int = 32
    max_relative_positions: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_count("position_buckets", "max_relative_positions")
        self._check_seed("seed")
        if self.position_buckets % 2 or self.max_relative_positions <= self.position_buckets // 2 + 1:
            raise PosencError(
                f"position_buckets={self.position_buckets} must be even, and half of them less than "
                f"max_relative_positions={self.max_relative_positions}."
            )

    def effect(self, geometry: Geometry) -> Effect:
        given = (self.position_buckets, self.max_relative_positions, self.seed)
        return Effect(bias=Disentangled(geometry, *given))
