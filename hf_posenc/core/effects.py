"""What a scheme is told about a model, and what it may change there."""

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
    """Rows and columns of patches in images of the config's size; empty on text models."""
    patch: tuple[int, ...] = ()
    """Height and width of a patch, in pixels."""
    layers: int = 0
    """How many layers attend, on vision models; elsewhere how many are patched, for schemes that ask (`per_layer`)."""
    whole: bool = False
    """Whether rotary modules scale all channels of q and k, in every layer; looked at only for a temperature."""

    @cached_property
    def axes(self) -> int:
        """How many numbers say where a token stands."""
        return len(self.grid) or 1


@dataclass(frozen=True)
class Span:
    """From the trained length to the wanted one. `factor` is None when nobody asked for more."""

    trained: int
    target: int
    factor: float | None


class TableSource(Protocol):
    """A vector per place, added to the input."""

    @property
    def reads_native(self) -> bool:
        """Whether it is made from the family's own table."""

    def module(self, native: nn.Embedding | None, like: Tensor) -> Any:
        """The module that gives the vectors; `native` is the family's own table, if that is to be replaced.

        A text model calls it with position ids. Where there are several axes, its `vectors` are asked for those of
        coordinates, (..., axes).
        """

    def restored(self, native: nn.Embedding | None, like: Tensor) -> Any:
        """The same, where `native` has been loaded from a checkpoint of the patched model."""

    def new_rows(self, has_native: bool) -> Tensor | None:
        """Which rows of a table that it makes are new, not taken over from the family's own; None if it makes none."""


@dataclass(frozen=True)
class ComputedSource:
    """The source of a table that is computed: in the place of a family's own one, or where there is none."""

    make: Callable[[int, int | None, Tensor], ComputedTable]
    """From the size of a vector, the rows that a checkpoint holds (None where there is no table of the family's) and a
    tensor whose dtype and device the vectors should have."""
    geometry: Geometry
    rows: int
    reads_native: bool = False

    def module(self, native: nn.Embedding | None, like: Tensor) -> ComputedTable:
        if native is None:
            return self.make(self.geometry.hidden_size, None, like)
        return self.make(native.embedding_dim, self.rows, like)

    restored = module

    def new_rows(self, has_native: bool) -> None:
        return None


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """Angles per position for the pairs of q and k channels."""

    inv_freq: tuple[float, ...]
    attention_scaling: float = 1.0
    rope_parameters: Mapping[str, Any] | None = None
    """The same rotation as `config.rope_parameters`, where transformers has a `rope_type` for it."""
    read_by_layers: Mapping[str, Any] | None = None
    """What is to be there as well for attention layers of some families, which read it by themselves."""

    follows_length: ClassVar[bool] = False
    """Whether the angles depend on how much a query can see, so that keys must be cached unrotated."""


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

    follows_length = True

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

    follows_length = True


class CoordinateRotation(Fp32Buffers):
    """A rotation of q and k by coordinates of several axes. A module, since its frequencies may be trained."""

    attention_scaling = 1.0
    rope_parameters = None
    follows_length = False

    def forward(self, layer: int, coordinates: Tensor) -> Tensor:
        """The angles of places, (places, axes) -> (heads or 1, places, pairs), in fp32."""
        raise NotImplementedError


@dataclass(frozen=True)
class OwnTable:
    """The family's own table as it is; nothing on families that have none."""

    reads_native: bool = True

    def new_rows(self, has_native: bool) -> None:
        return None

    def module(self, native: nn.Embedding | None, like: Tensor) -> Any:
        assert native is not None
        weight = native.weight.detach().clone()
        return LearnedTable.from_pretrained(weight, freeze=False)

    restored = module


@dataclass(frozen=True)
class OwnGrid:
    """The family's own vector per patch, resized as its own code would to images of another size; or new ones."""

    image_size: int | None
    """In pixels, of both sides; None for the model's own."""
    seed: int = 0
    reads_native: bool = True


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What a scheme contributes to each site. What it leaves out is neutralised."""

    table: TableSource | OwnGrid | None = None
    rotation: Rotation | CoordinateRotation | None = None
    bias: Bias | None = None
    """What is added to the scores of a query and a key; None for nothing."""
    pattern: Pattern | None = None
    """Which keys are seen, and at what distances; None for all, at their own."""
    forgets: bool = False
    """Whether keys that can never be seen again leave the cache."""
    temperature: Temperature | None = None
    """What queries are multiplied by inside attention; None for nothing."""
    apart: bool = False
    """Whether it is for some layers of those that share angles, beside others (a plan)."""
    own_temperature: float | None = None
    """What becomes of a temperature that the model's own code applies: it stays as it is (None), is taken away (0), or
    has another beta."""
