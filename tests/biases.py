"""Biases as others would write them, and every bias by its formula, pair by pair."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.models.t5.modeling_t5 import T5Attention

from hf_posenc.core.biases import Bias, DistanceBias
from hf_posenc.core.effects import Effect, Geometry
from hf_posenc.schemes.alibi import LinearBias, slopes
from hf_posenc.schemes.base import Scheme, register_scheme
from hf_posenc.schemes.fire import ProgressiveBias
from hf_posenc.schemes.kerple import KernelBias
from hf_posenc.schemes.sandwich import CosineBias
from hf_posenc.schemes.t5 import BucketBias

HEADS = 4


class KerpleLog(DistanceBias):
    """KERPLE (Chi et al. 2022): -r1 * log(1 + r2 * distance)."""

    def __init__(self, heads: int = HEADS):
        super().__init__()
        self.r1, self.r2 = (nn.Parameter(torch.linspace(start, 2.0, heads)) for start in (0.5, 0.1))

    def by_distance(self, distances: Tensor) -> Tensor:
        return -self.r1[:, None] * torch.log1p(self.r2[:, None] * distances.abs())


class KerplePower(DistanceBias):
    """KERPLE: -r1 * distance^r2."""

    def __init__(self, heads: int = HEADS):
        super().__init__()
        self.r1, self.r2 = (nn.Parameter(torch.linspace(start, 1.2, heads)) for start in (0.1, 0.4))

    def by_distance(self, distances: Tensor) -> Tensor:
        far = distances.abs().clamp(min=1) ** self.r2[:, None]  # the gradient of 0^r is NaN
        return -self.r1[:, None] * torch.where(distances == 0, 0.0, far)


class Far(Bias):
    """As FIRE (Li et al. 2023): a small network of the distance, over how far the query stands."""

    def __init__(self, heads: int = HEADS, width: int = 8):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.inner = nn.Parameter(torch.randn(2, width, generator=generator))
        self.outer = nn.Parameter(torch.randn(width, heads, generator=generator))
        self.c = nn.Parameter(torch.tensor([0.3]))
        self.threshold = nn.Parameter(torch.tensor([7.5]))

    def between(self, query: Tensor, key: Tensor) -> Tensor:
        distance = (query[:, :, None] - key[:, None, :]).abs()
        reach = torch.maximum(query, self.threshold)[:, :, None]
        part = torch.log1p(self.c * distance) / torch.log1p(self.c * reach)
        hidden = torch.relu(part[..., None] * self.inner[0] + self.inner[1])
        return (hidden @ self.outer.to(hidden.dtype)).movedim(-1, 1)


MADE: dict[str, Callable[[bool], Bias]] = {
    "alibi": lambda causal: LinearBias(slopes(HEADS), causal),
    "t5": lambda causal: BucketBias(HEADS, 32, 128, not causal, 1.0, 0),
    "sandwich": lambda causal: CosineBias(HEADS, 128),
    "kerple_log": lambda causal: KernelBias(HEADS, "log", 0),
    "kerple_power": lambda causal: KernelBias(HEADS, "power", 0),
    "fire": lambda causal: ProgressiveBias(HEADS, 32, 7.5, 0),
    "fire_near": lambda causal: ProgressiveBias(HEADS, 32, 100, 0),
    "other": lambda causal: Far(),
}
NOT_OF_DISTANCE = ("fire", "other")


def by_formula(name: str, parameters: dict[str, Tensor], query: Tensor, key: Tensor, causal: bool) -> Tensor:
    """(rows, heads, queries, keys), in fp64, from the bias's own tensors in fp64 and nothing else of it."""
    p = {given: x.view(-1, 1, 1) if x.ndim == 1 else x for given, x in parameters.items()}
    distance = (query[:, None, :, None] - key[:, None, None, :]).abs().double()
    if name == "alibi":
        return -p["slopes"] * distance
    if name == "t5":
        relative = key[:, None, :] - query[:, :, None]
        return p["weight"][T5Attention._relative_position_bucket(relative, not causal, 32, 128)].movedim(-1, 1)
    if name == "sandwich":  # sines and cosines of both positions, multiplied, over 8h/n
        inv_freq = parameters["frequencies"]
        torch.testing.assert_close(inv_freq, 10_000.0 ** (-torch.arange(64).double() / 64), rtol=1e-6, atol=0)
        angles = [at[..., None].double() * inv_freq for at in (query, key)]
        one, other = (torch.cat([a.sin(), a.cos()], -1) for a in angles)
        return (one @ other.mT)[:, None] / (8 * torch.arange(1, HEADS + 1).double() / HEADS).view(-1, 1, 1)
    if name == "kerple_log":
        return -p["r1"].clamp(min=0.01) * (1 + p["r2"].clamp(min=0.01) * distance).log()
    if name == "kerple_power":
        far = distance.clamp(min=1) ** p["r2"].clamp(0.01, 2)
        return -p["r1"].clamp(min=0.01) * torch.where(distance == 0, 0.0, far)
    if name.startswith("fire"):
        threshold = parameters["multiplier"] * (7.5 if name == "fire" else 100)
        later = torch.maximum(query[:, None, :, None], key[:, None, None, :]).double()
        reach = (1 + parameters["c"] * torch.maximum(later, threshold)).log() + 1e-6
        part = (1 + parameters["c"] * distance).log() / reach
        weight, constant = parameters["inner"]
        hidden = (part[..., None] * weight + constant).relu()
        return torch.einsum("bzqkw,hw->bhqk", hidden, parameters["outer"])
    reach = torch.maximum(query.double(), parameters["threshold"])[:, None, :, None]
    part = (1 + parameters["c"] * distance).log() / (1 + parameters["c"] * reach).log()
    hidden = (part[..., None] * p["inner"][0] + p["inner"][1]).relu()
    return torch.einsum("bzqkw,wh->bhqk", hidden, p["outer"])


def tensors_of(bias: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers in fp64, the parameters as leaves that take gradients."""
    own = {name: p.detach().double().requires_grad_(p.requires_grad) for name, p in bias.named_parameters()}
    return {**own, **{name: b.double() for name, b in bias.named_buffers()}}


def scheme_of(kind: type[Bias]) -> Scheme:
    """A scheme of somebody else, which adds this bias."""

    @register_scheme
    @dataclass(frozen=True, kw_only=True)
    class Made(Scheme):
        name = kind.__name__.lower()
        summary = "a bias of a test"

        def effect(self, geometry: Geometry) -> Effect:
            return Effect(bias=kind(geometry.num_heads))

    return Made()
