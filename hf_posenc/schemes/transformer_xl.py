"""Transformer-XL (Dai et al. 2019): queries and a trained vector times projected sinusoids of the distance."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..core.effects import Effect, Geometry
from ..core.relative import RelativeTerms, Terms
from ..errors import UnsupportedCell
from .base import Scheme, register_scheme

BASE = 10_000.0


class ProjectedSinusoids(RelativeTerms):
    """(q + u) k + (q + v) W R in each layer, where R has the sines and then the cosines of `query - key`."""

    follows_dtype = ("weight", "u", "v")
    frequencies: Tensor

    def __init__(self, geometry: Geometry, seed: int):
        super().__init__()
        layers, heads, size, hidden = geometry.layers, geometry.num_heads, geometry.head_dim, geometry.hidden_size
        generator, std = torch.Generator().manual_seed(seed), geometry.initializer_range

        def new_parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(std * torch.randn(*shape, generator=generator))

        self.weight = new_parameter(layers, heads, size, hidden)
        self.u, self.v = new_parameter(layers, heads, size), new_parameter(layers, heads, size)
        inv_freq = [BASE ** (-2 * i / hidden) for i in range(hidden // 2)]
        self.frequencies = nn.Buffer(torch.tensor(inv_freq), persistent=False)

    def terms(self, layer: int, first: int, last: int) -> Terms:
        weight = self.weight[layer]
        distances = torch.arange(first, last + 1, device=weight.device).neg()  # query - key
        angles = distances[:, None].to(torch.promote_types(weight.dtype, torch.float32)) * self.frequencies
        waves = torch.cat([angles.sin(), angles.cos()], -1).to(weight.dtype)
        return Terms(
            rows=lambda distance: distance - first,
            keys=waves.expand(len(weight), -1, -1).bmm(weight.mT),  # not `@`: see `deberta`
            content=self.u[layer],
            position=self.v[layer],
        )

    def extra_repr(self) -> str:
        layers, heads, size, hidden = self.weight.shape
        return f"layers={layers}, heads={heads}, sinusoids of {hidden} to {size}"


@register_scheme
@dataclass(frozen=True, kw_only=True)
class TransformerXL(Scheme):
    """Relative terms for any distance: queries are multiplied with projected sinusoids of the distance, and two
    trained vectors with keys and with these sinusoids. Its memory of earlier segments corresponds to a cache. The
    parameters are new and random: train them."""

    name = "transformer_xl"
    summary = "sinusoids of the distance, against the query and a learned vector"
    per_layer = True

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_seed("seed")

    def effect(self, geometry: Geometry) -> Effect:
        if geometry.hidden_size % 2:
            raise UnsupportedCell("Sines and cosines come in pairs, and this model's hidden size is odd.")
        return Effect(bias=ProjectedSinusoids(geometry, self.seed))
