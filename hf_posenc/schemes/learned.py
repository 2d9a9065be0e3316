"""Learned tables: the family's own one resized, or a new one."""

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
    """Row p is the table read at p * len(table) / rows; the last piece is continued straight."""
    i, t = _places(table, rows)
    return torch.lerp(table[i], table[i + 1], t)


def cubic_rows(table: Tensor, rows: int) -> Tensor:
    """As linear, through a Catmull-Rom spline; the rows before the first and after the last continue its ends."""
    i, t = _places(table, rows)
    ends = torch.cat([2 * table[:1] - table[1:2], table, 2 * table[-1:] - table[-2:-1]])
    a, b, c, d = (ends[i + k] for k in range(4))
    made = b + t / 2 * (c - a + t * (2 * a - 5 * b + 4 * c - d + t * (3 * (b - c) + d - a)))
    kept = stretched_rows(len(table), rows)
    made[kept] = table[_numbers(table, rows)[kept] * len(table) // rows]  # equal already but for rounding
    return made


def grouped_rows(table: Tensor, rows: int) -> Tensor:
    """Neighbours share a row, p read as p // factor (LongEmbed's grouped positions)."""
    return table[_numbers(table, rows) * len(table) // rows]


def cyclic_rows(table: Tensor, rows: int) -> Tensor:
    """The table over and over: Longformer's start, and LongEmbed's recurrent positions."""
    return table[_numbers(table, rows) % len(table)]


def hierarchical_rows(table: Tensor, rows: int, alpha: float) -> Tensor:
    """Row i*n + j is alpha*u_i + (1 - alpha)*u_j, u chosen so that the first n rows are the table's own (Su 2020)."""
    n = len(table)
    u = (table - alpha * table[:1]) / (1 - alpha)
    p = _numbers(table, rows)
    made = alpha * u[p // n] + (1 - alpha) * u[p % n]
    made[:n] = table[:rows]  # equal already but for rounding
    return made


def first_rows(length: int, rows: int) -> Tensor:
    """Which of the rows are the table's own where these come first."""
    return torch.arange(rows) < length


def stretched_rows(length: int, rows: int) -> Tensor:
    """Which of the rows are the table's own where these were moved apart."""
    return torch.arange(rows) * length % rows == 0


def _numbers(table: Tensor, rows: int) -> Tensor:
    return torch.arange(rows, device=table.device)


def _places(table: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The row of the table before each new one, and how far past it that stands; whole numbers, so as not to round."""
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
"""By way of resizing, which rows are trained ones, bit for bit; with `first_rows` short texts read what they did."""


@register_scheme
@dataclass(frozen=True, kw_only=True)
class Learned(Scheme):
    """The family's own table resized to the target, or a new random one (normal, seeded) where it has none.

    `cyclic` (LongEmbed's recurrent positions) and `hierarchical` keep the trained rows as they are; `linear`, the
    default, `cubic` and `grouped` move them apart, so that short texts are read otherwise as well. On images the grid
    of patches is resized bicubically to that of `image_size` (pixels), and each image that has another size gets it
    resized by the model's own code.
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
            raise PosencError("Recurrent positions, the table over and over, are resize='cyclic' here.")
        if self.resize is not None:
            self._check_choice("resize", tuple(RESIZE))
        self._check_count("image_size")
        self._check_number("alpha", above=0.0, most=0.999)
        self._check_seed("seed")
        if self.alpha == 0.5:
            raise PosencError("alpha=0.5 would give positions i*n + j and j*n + i the same vector; take 0.4.")

    def effect(self, geometry: Geometry) -> Effect:
        if geometry.axes > 1:
            return Effect(table=self._own_grid(geometry))
        if self.image_size is not None:
            raise PosencError("image_size is for vision models; on text give target_length.")
        rows, length = self.span(geometry).target, geometry.trained_length
        if self.resize == "hierarchical" and rows > length**2:
            raise PosencError(
                f"resize='hierarchical' makes at most {length}**2 = {length**2} rows, and {rows} are wanted."
            )
        return Effect(table=_Source(self, geometry))

    def _own_grid(self, geometry: Geometry) -> OwnGrid:
        if self.resize is not None:
            raise PosencError(f"resize={self.resize!r} is for text; grids of patches are resized bicubically.")
        (height, width), (rows, columns) = geometry.patch, geometry.grid
        if height != width or rows != columns:
            raise UnsupportedCell(
                f"A model's own code takes its table for a square grid of square patches when it resizes it, and this "
                f"one has {rows} rows and {columns} columns of patches of {height} x {width} pixels. Use 'fourier' "
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
            weight = self._resized(self._trained(native.weight.detach().float()), rows)
        weight = weight.to(dtype=like.dtype, device=like.device)
        return LearnedTable.from_pretrained(weight, freeze=False)

    def new_rows(self, has_native: bool) -> Tensor:
        rows = self.scheme.span(self.geometry).target
        if not has_native:
            return torch.ones(rows, dtype=torch.bool)
        return ~TRAINED[self.scheme.resize or "linear"](self.geometry.trained_length, rows)

    def restore(self, native: nn.Embedding | None, like: Tensor) -> nn.Module:
        if native is None:  # its weights come with those of the model
            return self.module(None, like)
        weight = native.weight.detach()
        return LearnedTable.from_pretrained(weight, freeze=False)

    def _trained(self, table: Tensor) -> Tensor:
        length = self.geometry.trained_length
        if length > len(table):
            raise PosencError(
                f"trained_length={length} is more than the {len(table)} rows of the model's own table; it can only "
                "be less."
            )
        if length < 2:
            raise PosencError("A table of one row cannot be resized: the model must have been trained at 2 or more.")
        return table[:length]

    def _resized(self, table: Tensor, rows: int) -> Tensor:
        if rows == len(table):
            return table.clone()
        if self.scheme.resize == "hierarchical":
            return hierarchical_rows(table, rows, self.scheme.alpha)
        return RESIZE[self.scheme.resize or "linear"](table, rows)  # type: ignore[operator]
