"""FIRE (Li et al. 2023): a small network of the distance, in proportion to how far the query stands."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..core.biases import Bend, FactoredBias, Factors
from ..core.effects import Effect, Geometry
from .base import Scheme, register_scheme

SHRINK = 0.1
"""What c starts at."""
TINY = 1e-6


class ProgressiveBias(FactoredBias):
    """f(ln(1 + c*distance) / ln(1 + c*reach)), the reach of a pair being its later position, or a threshold if that is
    further; f a network with one hidden layer. Constants are left out of its output: a row of scores has no use for
    them.

    Parts are between 0 and 1, and few hidden units bend there: all others are off, or add up to one line.
    """

    def __init__(self, heads: int, width: int, threshold: float, seed: int):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def uniform(*shape: int) -> Tensor:
            return 2 * torch.rand(*shape, generator=generator) - 1

        self.inner = nn.Parameter(uniform(2, width))
        """Weight and constant of each hidden unit."""
        self.outer = nn.Parameter(uniform(heads, width) * width**-0.5)
        self.c = nn.Parameter(torch.tensor(SHRINK))
        self.multiplier = nn.Parameter(torch.tensor(1.0))
        self.threshold = threshold

    @property
    def by_distance_until(self) -> float:
        """Up to the threshold the reach is the same for all; offloaded weights do not tell how far that is."""
        return 0.0 if self.multiplier.is_meta else float((self.threshold * self.multiplier.detach()).abs())

    def between(self, query: Tensor, key: Tensor) -> Tensor:
        query, key = query[:, :, None], key[:, None, :]
        part = self._log(query - key) / self._whole(torch.maximum(query, key))
        with torch.autocast(part.device.type, enabled=False):  # which would round this product
            weight, constant, outer, slope, height = self._units(part.dtype)
            bent = torch.addcmul(constant[:, None], weight[:, None], part.flatten()).relu_()
            units, weights = torch.cat([bent, part.reshape(1, -1)]), torch.cat([outer, slope[:, None]], 1)
            return torch.addmm(height[:, None], weights, units).view(-1, *part.shape).movedim(0, 1)

    def factors(self, query: Tensor, distances: Tensor) -> Factors:
        """Parts are products, and so is what units give that are all on or all off at a distance. Where a unit is on
        for some of these queries alone, it is added for each."""
        weight, constant, outer, slope, height = self._units(query.dtype)
        scale, log = 1 / self._whole(query), self._log(distances.clamp(min=0))
        with torch.no_grad():
            ends = torch.stack(scale.aminmax())[:, None, None] * log * weight[:, None] + constant[:, None] > 0
            on, bent = ends.all(0).to(query.dtype), ends[0] != ends[1]
            starts, counts = bent.byte().argmax(1).tolist(), bent.sum(1).tolist()
        bends = []
        for k, (start, count) in enumerate(zip(starts, counts, strict=True)):
            if count:
                parts = scale[..., None] * log[start : start + count]
                bends.append(Bend(start, outer[:, k], torch.addcmul(constant[k], weight[k], parts).relu()))
        slopes = ((outer * weight) @ on + slope[:, None]) * log
        heights = (outer * constant) @ on + height[:, None]
        return Factors(scale, slopes, heights, tuple(bends))

    def _log(self, distance: Tensor) -> Tensor:
        return torch.log1p(self.c.abs() * distance.abs())

    def _whole(self, position: Tensor) -> Tensor:
        """What a distance is a part of, by its logarithm, for a pair whose later position this is."""
        threshold = (self.threshold * self.multiplier).abs().to(position.dtype)
        return torch.log1p(self.c.abs() * torch.maximum(position, threshold)) + TINY

    def _units(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Weight and constant of the hidden units that bend between 0 and 1, and their outer weights, (heads, units);
        slope and height of what all others add up to, a line for each head."""
        (weight, constant), outer = self.inner.to(dtype).unbind(), self.outer.to(dtype)
        if torch.compiler.is_compiling():  # which cannot count them
            none = outer.new_zeros(len(outer))
            return weight, constant, outer, none, none
        with torch.no_grad():
            ends = torch.stack([constant, weight + constant]) > 0
            bends = ends[0] != ends[1]
            straight = (ends[0] & ends[1]).to(dtype)
        slope, height = outer @ (straight * weight), outer @ (straight * constant)
        return weight[bends], constant[bends], outer[:, bends], slope, height

    def extra_repr(self) -> str:
        heads, width = self.outer.shape
        return f"heads={heads}, width={width}, threshold={self.threshold:g}"


@register_scheme
@dataclass(frozen=True, kw_only=True)
class Fire(Scheme):
    """Distances as parts of the text so far, through a network: within `threshold` tokens, which is trained as well,
    as parts of that. On encoders both sides count alike. The parameters are new and start random: train them."""

    name = "fire"
    summary = "learned network of the distance, over how far the query stands"
    example = {"threshold": 20}

    width: int = 32
    threshold: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_count("width", "threshold")
        self._check_seed("seed")

    def effect(self, geometry: Geometry) -> Effect:
        return Effect(bias=ProgressiveBias(geometry.num_heads, self.width, float(self.threshold), self.seed))
