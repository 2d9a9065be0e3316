"""Sinusoids added to the input (Vaswani et al. 2017), for texts and images."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.axes import ANY_AXES
from ..core.effects import ComputedSource, Effect, Geometry
from ..core.tables import ComputedTable, frequency_tensor
from ..errors import UnsupportedCell
from .base import Scheme, register_scheme
from .frequencies import default_frequencies

LAYOUTS = ("interleaved", "concatenated")
LOG, GAUSSIAN, LEARNED = "log", "gaussian", "learned"
FREQUENCIES = (LOG, GAUSSIAN, LEARNED)
"""Where the frequencies of a table come from."""


def sinusoids(positions: Tensor, inv_freq: Tensor, layout: str) -> Tensor:
    """sin and cos of position * frequency: alternating ("interleaved"), or all sines and then all cosines."""
    angles = positions[..., None].float() * inv_freq
    pair = (angles.sin(), angles.cos())
    return torch.stack(pair, -1).flatten(-2) if layout == "interleaved" else torch.cat(pair, -1)


def axis_sinusoids(positions: Tensor, inv_freq: Tensor, layout: str) -> Tensor:
    """The sinusoids of each axis, concatenated: (..., axes) and (axes, pairs) -> (..., 2 * axes * pairs)."""
    return torch.cat([sinusoids(positions[..., a], inv_freq[a], layout) for a in range(len(inv_freq))], -1)


def log_frequencies(size: int, axes: int, base: float) -> Tensor:
    """base^(-2i/n) with n channels for each axis: (axes, n/2)."""
    return torch.tensor([default_frequencies(size // axes, base)] * axes)


def refuse_odd(size: int, axes: int) -> None:
    if size % (2 * axes):
        if axes == 1:
            each, fault, other = "", "odd", "alibi"
        else:
            each, fault, other = f" for each of {axes} axes", f"not a multiple of {2 * axes}", "axial_rope"
        raise UnsupportedCell(
            f"Sinusoids come in pairs{each}, and this model's hidden size {size} is {fault}. Use a scheme that adds "
            f"nothing to the input, such as {other!r}."
        )


class SinusoidTable(ComputedTable):
    """A table of sinusoids, in which each axis has an equal share of the channels. Random and learned frequencies are
    saved with the model."""

    posenc_frequencies: Tensor

    def __init__(self, frequencies: Tensor, kind: str, layout: str, rows: int | None, like: Tensor):
        super().__init__(2 * frequencies.numel(), rows, like)
        self.kind, self.layout, self.axes = kind, layout, len(frequencies)
        values = frequencies.to(like.device)
        self.posenc_frequencies = frequency_tensor(values, saved=kind != LOG, trained=kind == LEARNED)

    def vectors(self, coordinates: Tensor) -> Tensor:
        return axis_sinusoids(coordinates, self.posenc_frequencies, self.layout)

    def extra_repr(self) -> str:
        said = f"size={self.size}, frequencies={self.kind}, layout={self.layout}"
        return f"axes={self.axes}, {said}" if self.axes > 1 else said


@register_scheme
@dataclass(frozen=True, kw_only=True)
class Sinusoidal(Scheme):
    """Adds sin and cos of the position to the input, with frequencies base^(-2i/hidden_size)."""

    name = "sinusoidal"
    summary = "sines and cosines added to the input"
    adds_to_input = True
    axes = ANY_AXES

    base: float = 10_000.0
    layout: str = "interleaved"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_number("base", above=1.0)
        self._check_choice("layout", LAYOUTS)

    def effect(self, geometry: Geometry) -> Effect:
        refuse_odd(geometry.hidden_size, geometry.axes)

        def table(size: int, rows: int | None, like: Tensor) -> SinusoidTable:
            return SinusoidTable(log_frequencies(size, geometry.axes, self.base), LOG, self.layout, rows, like)

        return Effect(table=ComputedSource(table, geometry, self.span(geometry).target))
