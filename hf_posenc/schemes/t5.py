"""T5's relative bias (Raffel et al. 2019): a learned number per head and bucket of distances."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..core.biases import DistanceBias
from ..core.effects import Effect, Geometry
from ..errors import PosencError
from .base import Scheme, register_scheme


def bucket(distance: Tensor, buckets: int, max_distance: int, bidirectional: bool) -> Tensor:
    """The bucket of each distance `key - query`: half of them hold one distance, the others are logarithmic."""
    offset = torch.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        offset = (distance > 0).long() * buckets
        distance = distance.abs()
    else:
        distance = -distance.clamp(max=0)
    exact = buckets // 2
    octaves = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = exact + (octaves * (buckets - exact)).long()
    return offset + torch.where(distance < exact, distance, far.clamp(max=buckets - 1))


class BucketBias(DistanceBias):
    """A trainable number per bucket and head, shared by all layers."""

    follows_dtype = ("weight",)

    def __init__(self, heads: int, buckets: int, max_distance: int, bidirectional: bool, std: float, seed: int):
        super().__init__()
        self.buckets, self.max_distance, self.bidirectional = buckets, max_distance, bidirectional
        values = torch.randn(buckets, heads, generator=torch.Generator().manual_seed(seed)) * std
        self.weight = nn.Parameter(values)

    def by_distance(self, distances: Tensor) -> Tensor:
        # Beyond max_distance the bucket does not change, so that buckets are computed only up to it.
        most = self.max_distance
        near = torch.arange(-most, most + 1, device=distances.device)
        buckets = bucket(near, self.buckets, most, self.bidirectional)
        return self.weight[buckets[distances.long().clamp(-most, most) + most]].mT

    def extra_repr(self) -> str:
        side = "bidirectional" if self.bidirectional else "causal"
        return f"heads={self.weight.shape[1]}, buckets={self.buckets}, max_distance={self.max_distance}, {side}"


@register_scheme
@dataclass(frozen=True, kw_only=True)
class T5(Scheme):
    """Bucketed relative bias. The parameters are new and random (normal, 1/sqrt(hidden size)): train them."""

    name = "t5"
    summary = "learned bias per head and bucket of distances"

    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_count("relative_attention_num_buckets", "relative_attention_max_distance")
        self._check_seed("seed")
        buckets, most = self.relative_attention_num_buckets, self.relative_attention_max_distance
        if buckets < 4 or buckets % 4:
            raise PosencError(f"relative_attention_num_buckets must be a multiple of 4, got {buckets}.")
        if most <= buckets // 2:
            raise PosencError(
                f"relative_attention_max_distance={most} must be greater than half of the {buckets} buckets, which "
                "hold one distance each."
            )

    def effect(self, geometry: Geometry) -> Effect:
        return Effect(
            bias=BucketBias(
                geometry.num_heads,
                self.relative_attention_num_buckets,
                self.relative_attention_max_distance,
                not geometry.causal,
                geometry.hidden_size**-0.5,
                self.seed,
            )
        )
