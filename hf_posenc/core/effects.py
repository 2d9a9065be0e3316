"""`Geometry`, what a scheme is told about a model, and `Effect`, what it changes there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from .biases import Bias
from .patterns import Pattern
from .precision import Fp32Buffers
from .tables import ComputedTable, LearnedTable
from .temperatures import Temperature


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The numbers of a model that schemes compute with. Plain data, saved with every checkpoint."""

    hidden_size: int
    num_heads: int
    head_dim: int
    rotary_dim: int
    """How many channels of a head are rotated; the whole head on families without RoPE."""
    trained_length: int
    causal: bool
    initializer_range: float = 0.02
    rope: Mapping[str, Any] | None = None
    """The model's own `rope_parameters`, from which a scheme starts; None on families without RoPE."""
    layout: str = "halves"
    """Which channels form a pair (`runtime/rotation.py`), for schemes that are rotated inside attention."""
    unturned: tuple[int, ...] = ()
    """Layers that the model does not rotate, by their index in the group."""
    grid: tuple[int, ...] = ()
    """Rows and columns of patches in an image of the config's size; empty on text models."""
    patch: tuple[int, ...] = ()
    """Height and width of a patch, in pixels."""
    layers: int = 0
    """The number of attention layers on vision models. On text models, the number of patched layers, filled in only
    for schemes that declare `per_layer`."""
    whole: bool = False
    """Whether rotary modules scale all channels of q and k in every layer. Filled in only for a temperature."""

    @cached_property
    def axes(self) -> int:
        """The number of coordinates of a token."""
        return len(self.grid) or 1


@dataclass(frozen=True)
class Span:
    """The trained length, the target length and their ratio. `factor` is None if no longer target was requested."""

    trained: int
    target: int
    factor: float | None


class TableSource(Protocol):
    """Makes the module that gives a vector per position, which is added to the input."""

    @property
    def reads_native(self) -> bool:
        """Whether the new table is made from the family's own one."""

    def module(self, native: nn.Embedding | None, like: Tensor) -> Any:
        """The module that gives the vectors. `native` is the family's own table, if there is one to replace.

        A text model calls the module with position ids. With several axes its `vectors` are called with coordinates,
        (..., axes).
        """

    def restore(self, native: nn.Embedding | None, like: Tensor) -> Any:
        """The same module, where `native` was loaded from a checkpoint of the patched model."""

    def new_rows(self, has_native: bool) -> Tensor | None:
        """Which rows of its table are new and not copied from the family's own; None if it has no trainable table."""


@dataclass(frozen=True)
class ComputedSource:
    """The source of a computed table, which replaces the family's own one or is added where there is none."""

    make: Callable[[int, int | None, Tensor], ComputedTable]
    """Called with the size of a vector, the number of rows that a checkpoint holds (None if the family has no table),
    and a tensor whose dtype and device the vectors should have."""
    geometry: Geometry
    rows: int
    reads_native: bool = False

    def module(self, native: nn.Embedding | None, like: Tensor) -> ComputedTable:
        if native is None:
            return self.make(self.geometry.hidden_size, None, like)
        return self.make(native.embedding_dim, self.rows, like)

    restore = module

    def new_rows(self, has_native: bool) -> None:
        return None


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """The frequencies by which pairs of channels of q and k are rotated per position."""

    inv_freq: tuple[float, ...]
    attention_scaling: float = 1.0
    rope_parameters: Mapping[str, Any] | None = None
    """The same rotation as `config.rope_parameters`; None if transformers has no `rope_type` for it."""
    read_by_layers: Mapping[str, Any] | None = None
    """Further `rope_parameters` keys that attention layers of some families read by themselves."""

    follows_length: ClassVar[bool] = False
    """Whether the angles depend on how much text a query sees, so that keys must be cached unrotated."""


@dataclass(frozen=True, kw_only=True)
class FollowingRotation(Rotation):
    """A rotation whose frequencies shrink in stages as the visible text grows past `border`.

    A query that sees `length` tokens is in stage ceil((length - border) / step), or in stage 0 up to the border. In a
    stage, pair i rotates with `inv_freq[i] * exp(-growth(stage) * weights[i])`. The stage belongs to the query and not
    to the call, so that full, cached and chunked passes agree and rows of a batch do not affect each other.
    """

    weights: tuple[float, ...]
    border: int
    step: int | None
    """A new stage begins every `step` tokens past the border; None for a single stage past it."""
    factor: float = 1.0

    follows_length = True

    def stage(self, length: Tensor) -> Tensor:
        over = (length - self.border).clamp(min=0)
        if self.step is None:
            return (over > 0).long()
        return torch.div(over + self.step - 1, self.step, rounding_mode="floor")

    def growth(self, stage: Tensor) -> Tensor:
        if self.step is None:
            return stage.float()
        return torch.log1p(stage.float() * (self.step * self.factor / self.border))


@dataclass(frozen=True, kw_only=True)
class LateRotation(Rotation):
    """A rotation that depends on the pair of a query and a key (a pattern), so that keys are cached unrotated."""

    follows_length = True


class CoordinateRotation(Fp32Buffers):
    """A rotation of q and k by coordinates of several axes. It is a module because its frequencies may be trained."""

    attention_scaling = 1.0
    rope_parameters = None
    follows_length = False

    def forward(self, layer: int, coordinates: Tensor) -> Tensor:
        """The angles at these coordinates: (tokens, axes) -> (heads or 1, tokens, pairs), in fp32."""
        raise NotImplementedError


@dataclass(frozen=True)
class OwnTable:
    """Keeps the family's own table unchanged; does nothing on families without one."""

    reads_native: bool = True

    def new_rows(self, has_native: bool) -> None:
        return None

    def module(self, native: nn.Embedding | None, like: Tensor) -> Any:
        assert native is not None
        weight = native.weight.detach().clone()
        return LearnedTable.from_pretrained(weight, freeze=False)

    restore = module


@dataclass(frozen=True)
class OwnGrid:
    """The family's own table of patches, resized as its own code does for another image size; a new one where there
    is none."""

    image_size: int | None
    """Height and width in pixels; None for the model's own size."""
    seed: int = 0
    reads_native: bool = True


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What a scheme puts at each site of a model. A site that it leaves out is neutralised."""

    table: TableSource | OwnGrid | None = None
    rotation: Rotation | CoordinateRotation | None = None
    bias: Bias | None = None
    """Added to attention scores; None for nothing."""
    pattern: Pattern | None = None
    """Which keys a query sees and at which distances; None for all keys at their true distances."""
    forgets: bool = False
    """Whether the cache drops keys that no later query can see."""
    temperature: Temperature | None = None
    """Multiplies queries inside attention; None for nothing."""
    apart: bool = False
    """Whether it belongs to a plan, and so to only some of the layers that share the model's angles."""
    own_temperature: float | None = None
    """The beta of a temperature that the model's own code applies: None keeps it, 0 switches it off, another number
    replaces it."""
