"""Learned position tables: the family's own one, resized, or a new one. Each way of resizing is a function here."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..core.axes import ONE_AXIS, TWO_AXES
from ..core.effects import Effect, Geometry, OwnGrid
from ..core.tables import LearnedTable
from ..errors import PosencError, UnsupportedCell
from .base import Scheme, register_scheme


def linear_rows(table: Tensor, rows: int) -> Tensor:
    """Row p is the table interpolated linearly at p * len(table) / rows; beyond its end it is extrapolated."""
    i, t = _places(table, rows)
    return torch.lerp(table[i], table[i + 1], t)


def cubic_rows(table: Tensor, rows: int) -> Tensor:
    """Like `linear_rows`, with a Catmull-Rom spline, for which the table is extrapolated by a row at both ends."""
    i, t = _places(table, rows)
    ends = torch.cat([2 * table[:1] - table[1:2], table, 2 * table[-1:] - table[-2:-1]])
    a, b, c, d = (ends[i + k] for k in range(4))
    made = b + t / 2 * (c - a + t * (2 * a - 5 * b + 4 * c - d + t * (3 * (b - c) + d - a)))
    kept = stretched_rows(len(table), rows)
    made[kept] = table[_numbers(table, rows)[kept] * len(table) // rows]  # removes rounding errors
    return made


def grouped_rows(table: Tensor, rows: int) -> Tensor:
    """Neighbouring positions share a row: p reads row p // factor (LongEmbed's grouped positions)."""
    return table[_numbers(table, rows) * len(table) // rows]


def cyclic_rows(table: Tensor, rows: int) -> Tensor:
    """The table repeated (Longformer's initialization, LongEmbed's recurrent positions)."""
    return table[_numbers(table, rows) % len(table)]


def hierarchical_rows(table: Tensor, rows: int, alpha: float) -> Tensor:
    """Row i*n + j is alpha*u_i + (1 - alpha)*u_j, u such that the first n rows are the table (Su 2020)."""
    n = len(table)
    u = (table - alpha * table[:1]) / (1 - alpha)
    p = _numbers(table, rows)
    made = alpha * u[p // n] + (1 - alpha) * u[p % n]
    made[:n] = table[:rows]  # removes rounding errors
    return made


def first_rows(length: int, rows: int) -> Tensor:
    """Which new rows equal rows of the table, if these come first."""
    return torch.arange(rows) < length


def stretched_rows(length: int, rows: int) -> Tensor:
    """Which new rows equal rows of the table, if these were spread evenly."""
    return torch.arange(rows) * length % rows == 0


def _numbers(table: Tensor, rows: int) -> Tensor:
    return torch.arange(rows, device=table.device)


def _places(table: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """For each new row the table's row before it, and its distance past that. Integers avoid rounding."""
    where = _numbers(table, rows) * len(table)
    i = torch.div(where, rows, rounding_mode="floor").clamp(max=max(len(table) - 2, 0))
    return i, ((where - i * rows).to(table.dtype) / rows)[:, None]


RESIZE = {
    "linear": linear_rows,
    "cubic": cubic_rows,
    "grouped": grouped_rows,
    "cyclic": cyclic_rows,
    "hierarchical": hierarchical_rows,
}
TRAINED = {
    "linear": stretched_rows,
    "cubic": stretched_rows,
    "grouped": stretched_rows,
    "cyclic": first_rows,
    "hierarchical": first_rows,
}
"""For each way of resizing, which new rows are trained ones, bit for bit. `first_rows` keeps short texts unchanged."""


@register_scheme
@dataclass(frozen=True, kw_only=True)
class Learned(Scheme):
    """The family's own table, resized to the target length, or a new random one (normal, seeded) if it has none.

    `cyclic` (LongEmbed's recurrent positions) and `hierarchical` keep the trained rows in place. `linear` (the
    default), `cubic` and `grouped` spread them, which changes short texts as well. On images the grid of patches is
    resized bicubically to that of `image_size` (pixels). For an image of another size the model's own code resizes it.
    """

    name = "learned"
    keeps = ("table",)
    summary = "a trainable table, the family's own one resized"
    adds_to_input = True
    axes = range(ONE_AXIS.start, TWO_AXES.stop)
    example = {"target_length": 128}

    resize: str | None = None
    alpha: float = 0.4
    seed: int = 0
    image_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.resize == "recurrent":
            raise PosencError("resize='recurrent' is called 'cyclic' here. Give resize='cyclic'.")
        if self.resize is not None:
            self._check_choice("resize", tuple(RESIZE))
        self._check_count("image_size")
        self._check_number("alpha", above=0.0, most=0.999)
        self._check_seed("seed")
        if self.alpha == 0.5:
            raise PosencError(
                "alpha=0.5 would give positions i*n + j and j*n + i the same vector. Give another, as 0.4."
            )

    def effect(self, geometry: Geometry) -> Effect:
        if geometry.axes > 1:
            return Effect(table=self._own_grid(geometry))
        if self.image_size is not None:
            raise PosencError(
                "image_size is for vision models, and this model reads text. Give target_length instead."
            )
        rows, length = self.span(geometry).target, geometry.trained_length
        if self.resize == "hierarchical" and rows > length**2:
            raise PosencError(
                f"resize='hierarchical' makes at most {length}**2 = {length**2} rows, and {rows} are needed. Give a "
                "smaller target, or another resize=."
            )
        return Effect(table=_Source(self, geometry))

    def _own_grid(self, geometry: Geometry) -> OwnGrid:
        if self.resize is not None:
            raise PosencError(
                f"resize={self.resize!r} is for text, and grids of patches are always resized bicubically. Leave "
                "resize out."
            )
        (height, width), (rows, columns) = geometry.patch, geometry.grid
        if height != width or rows != columns:
            raise UnsupportedCell(
                "Models resize their own table as a square grid of square patches, and this one has "
                f"{rows} rows and {columns} columns of patches of {height} x {width} pixels. Use 'fourier' "
                "with learned frequencies, or 'axial_rope'."
            )
        if self.image_size is not None and self.image_size < height:
            raise PosencError(f"image_size={self.image_size} is less than a patch, which has {height} pixels a side.")
        return OwnGrid(self.image_size, self.seed)


@dataclass(frozen=True)
class _Source:
    scheme: Learned
    geometry: Geometry
    reads_native: bool = True

    def module(self, native: nn.Embedding | None, like: Tensor) -> nn.Module:
        rows = self.scheme.span(self.geometry).target
        if native is None:
            generator = torch.Generator().manual_seed(self.scheme.seed)
            weight = torch.randn(rows, self.geometry.hidden_size, generator=generator)
            weight = weight * self.geometry.initializer_range
        else:
            weight = self._resize(self._trained_rows(native.weight.detach().float()), rows)
        weight = weight.to(dtype=like.dtype, device=like.device)
        return LearnedTable.from_pretrained(weight, freeze=False)

    def new_rows(self, has_native: bool) -> Tensor:
        rows = self.scheme.span(self.geometry).target
        if not has_native:
            return torch.ones(rows, dtype=torch.bool)
        return ~TRAINED[self.scheme.resize or "linear"](self.geometry.trained_length, rows)

    def restore(self, native: nn.Embedding | None, like: Tensor) -> nn.Module:
        if native is None:  # its weights are loaded with those of the model
            return self.module(None, like)
        weight = native.weight.detach()
        return LearnedTable.from_pretrained(weight, freeze=False)

    def _trained_rows(self, table: Tensor) -> Tensor:
        length = self.geometry.trained_length
        if length > len(table):
            raise PosencError(
                f"trained_length={length} is more than the {len(table)} rows of the model's own table. Give at most "
                f"{len(table)}."
            )
        if length < 2:
            raise PosencError("A table of one row cannot be resized: the model must have been trained at 2 or more.")
        return table[:length]

    def _resize(self, table: Tensor, rows: int) -> Tensor:
        if rows == len(table):
            return table.clone()
        if self.scheme.resize == "hierarchical":
            return hierarchical_rows(table, rows, self.scheme.alpha)
        return RESIZE[self.scheme.resize or "linear"](table, rows)  # type: ignore[operator]
