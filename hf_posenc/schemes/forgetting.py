"""Forgetting: FoX (Lin et al. 2025) and CABLE (Veisi et al. 2025).

A gate, computed from each token's hidden state, says how much of the earlier text is forgotten there. The bias of a
query and a key is the sum of the gates between them. Under a causal mask the softmax ignores the query's own sum, so
that one number per key is enough.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.biases import ContentBias
from ..core.effects import Effect, Geometry
from ..errors import UnsupportedCell
from .base import Scheme, register_scheme

START = 0.01
"""Before training, the gates over the trained length add up to this logarithm: about one percent is forgotten."""


class Forgetting(ContentBias):
    """Gates for each layer and head: the logarithm of what a token keeps of the past, -softplus(sign * (w x + b))."""

    def __init__(self, geometry: Geometry, sign: int, constant: float, std: float, seed: int):
        super().__init__()
        self.sign = sign
        shape = (geometry.layers, geometry.num_heads)
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(std * torch.randn(*shape, geometry.hidden_size, generator=generator))
        self.constant = nn.Parameter(torch.full(shape, constant))

    def of_tokens(self, states: Tensor, layer: int) -> Tensor:
        gate = F.linear(states, self.weight[layer].to(states.dtype), self.constant[layer].to(states.dtype))
        return -F.softplus(self.sign * gate).mT

    def extra_repr(self) -> str:
        layers, heads, size = self.weight.shape
        return f"layers={layers}, heads={heads}, states of {size}"


@dataclass(frozen=True, kw_only=True)
class ForgettingScheme(Scheme):
    """`constant` is the initial b of all gates. By default almost nothing is forgotten at first, and the model starts
    like one without positions. `std` is the standard deviation of the initial w; with 0 all gates start equal."""

    per_layer = True
    sign: ClassVar[int]

    constant: float | None = None
    std: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_number("constant")
        self._check_number("std", least=0.0)
        self._check_seed("seed")

    def effect(self, geometry: Geometry) -> Effect:
        if not geometry.causal:
            raise UnsupportedCell(
                f"{self.name!r} sums gates from a key to a later query, and in this model, an encoder, queries see "
                "later keys as well. Use 'alibi' or 't5'."
            )
        start = math.log(math.expm1(START / geometry.trained_length)) * self.sign
        constant = start if self.constant is None else float(self.constant)
        return Effect(bias=Forgetting(geometry, self.sign, constant, float(self.std), self.seed))


@register_scheme
@dataclass(frozen=True, kw_only=True)
class Fox(ForgettingScheme):
    """The forgetting transformer: at each token, sigmoid(w x + b) of the past is kept, for each layer and head. The
    parameters are new: train them."""

    name = "fox"
    summary = "learned forgetting: each token says how much of the past is left"
    example = {"constant": 1.0, "std": 0.3}
    sign = -1


@register_scheme
@dataclass(frozen=True, kw_only=True)
class Cable(ForgettingScheme):
    """Context-aware biases: each token adds softplus(w x + b) to the penalty on all earlier keys. It is FoX with the
    opposite sign in its gates. The authors have no b; here it lets training start with almost no penalty."""

    name = "cable"
    summary = "learned penalty that each token adds to all before it"
    example = {"constant": -1.0, "std": 0.3, "seed": 1}
    sign = 1
