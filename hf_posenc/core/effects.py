"""What a scheme is told about a model, and what it may change there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..errors import PosencError
from .biases import Bias
from .patterns import Pattern
from .tables import LearnedTable


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The numbers of a model that schemes compute with. Plain data: it is saved with every checkpoint."""

    hidden_size: int
    num_heads: int
    head_dim: int
    rotary_dim: int
    """Channels of a head that are rotated; the whole head on families without RoPE."""
    trained_length: int
    causal: bool
    initializer_range: float = 0.02
    rope: Mapping[str, Any] | None = None
    """The model's own `rope_parameters`, which a scheme starts from; None on families without RoPE."""
    layout: str = "halves"
    """Which channels form a pair, for schemes that rotate them by themselves."""
    unturned: tuple[int, ...] = ()
    """Layers, by their place in the group, that the model does not rotate."""
    grid: tuple[int, ...] = ()
    """Rows and columns of patches in the images of the config's size; empty on models of text."""
    patch: tuple[int, ...] = ()
    """Height and width of a patch, in pixels."""
    layers: int = 0
    """How many layers attend, on models of images."""


@dataclass(frozen=True)
class Span:
    """From the trained length to the wanted one. `factor` is None when nobody asked for more."""

    trained: int
    target: int
    factor: float | None


class TableSource(Protocol):
    """A vector per position, added to the input."""

    @property
    def reads_native(self) -> bool:
        """Whether it is made from the family's own table."""

    def module(self, native: nn.Embedding | None, like: Tensor) -> Any:
        """The module that maps position ids to vectors; `native` is the family's own table, if it has one."""

    def restored(self, native: nn.Embedding | None, like: Tensor) -> Any:
        """The same, where `native` has been loaded from a checkpoint of the patched model."""


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """Angles per position for the pairs of q and k channels."""

    inv_freq: tuple[float, ...]
    attention_scaling: float = 1.0
    parameters: Mapping[str, Any] | None = None
    """The same rotation in the words of `config.rope_parameters`, where transformers has words for it."""

    @property
    def follows_length(self) -> bool:
        """Whether the angles depend on how much a query can see, so that keys must be cached unrotated."""
        return False


@dataclass(frozen=True, kw_only=True)
class FollowingRotation(Rotation):
    """A rotation whose frequencies shrink in stages as the visible text grows past `border`.

    A query that sees `length` tokens is in stage ceil((length - border) / step), or 0 up to the border;
    in a stage, pair i rotates with `inv_freq[i] * exp(-growth(stage) * weights[i])`. The stage belongs to the
    query, not to the call: so a full pass, a cached one and a chunked one agree, and no row sees its neighbours.
    """

    weights: tuple[float, ...]
    border: int
    step: int | None
    """Stages repeat every `step` tokens; None means that there is just one border."""
    factor: float = 1.0

    @property
    def follows_length(self) -> bool:
        return True

    def stage(self, length: Tensor) -> Tensor:
        over = (length - self.border).clamp(min=0)
        if self.step is None:
            return (over > 0).long()
        return torch.div(over + self.step - 1, self.step, rounding_mode="floor")

    def growth(self, stage: Tensor) -> Tensor:
        if self.step is None:
            return stage.float()
        return torch.log1p(stage * (self.step * self.factor / self.border))


@dataclass(frozen=True, kw_only=True)
class LateRotation(Rotation):
    """A rotation that depends on the pair of a query and a key, so that keys are cached unrotated."""

    @property
    def follows_length(self) -> bool:
        return True


@dataclass(frozen=True)
class OwnTable:
    """The family's own table as it is; nothing on families that have none."""

    reads_native: bool = True
    only_native: bool = True

    def module(self, native: nn.Embedding | None, like: Tensor) -> Any:
        assert native is not None
        weight = native.weight.detach().clone()
        return LearnedTable(len(weight), weight.shape[1], _weight=weight)

    restored = module


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What a scheme contributes to each site. What it leaves out is neutralised."""

    table: TableSource | None = None
    rotation: Rotation | None = None
    bias: Bias | None = None
    """What is added to the scores of a query and a key; None for nothing."""
    pattern: Pattern | None = None
    """Which keys are seen, and at what distances; None for all, at their own."""
    forgets: bool = False
    """Whether keys that can never be seen again leave the cache."""


@dataclass(frozen=True)
class OwnGrid:
    """A trainable vector per patch: the model's own ones, resized to a grid of another size, or new ones."""

    image_size: int | None
    """In pixels, of both sides; None for the model's own."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class ImageEffect:
    """What a scheme contributes to each site of a model of images. What it leaves out is neutralised."""

    table: nn.Module | None = None
    """`table(rows, columns)` -> (patches, hidden size), in fp32, added to the input."""
    own: OwnGrid | None = None
    """Or the model's own table, which its own code reads."""
    rotation: nn.Module | None = None
    """`rotation(layer, rows, columns)` -> angles of the patches, (heads or 1, patches, pairs), in fp32."""

    @property
    def sealed(self) -> bool:
        """Whether plain transformers cannot run this: it can read a table of one size, and resize it."""
        return self.table is not None or self.rotation is not None


def span(geometry: Geometry, target_length: int | None, factor: float | None) -> Span:
    """The three numbers (trained, target, factor) from any two of them; contradictions raise."""
    trained = geometry.trained_length
    if target_length is not None and target_length < trained:
        raise PosencError(
            f"target_length={target_length} is shorter than the trained length {trained}. Give a target of at least "
            f"{trained}, or trained_length= if the config overstates what the model was trained on."
        )
    if target_length is None and factor is None:
        return Span(trained, trained, None)
    if target_length is None:
        assert factor is not None
        return Span(trained, round(trained * factor), float(factor))
    if factor is not None and abs(trained * factor - target_length) >= 1:
        raise PosencError(
            f"target_length={target_length} and factor={factor} contradict each other: the model was trained at "
            f"{trained}, so that factor {factor} reaches {trained * factor:g} and a target of {target_length} needs "
            f"factor {target_length / trained:g}. Give one of the two, or trained_length= if the config is wrong."
        )
    return Span(trained, target_length, float(factor) if factor is not None else target_length / trained)


def finite(value: object) -> bool:
    """Whether a value is a number that maths can be done with (bool is not)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond every float
        return False
