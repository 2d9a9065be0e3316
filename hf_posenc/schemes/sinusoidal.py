"""Sinusoids added to the input (Vaswani et al. 2017), at any length."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..core.axes import coordinates
from ..core.effects import Effect, Geometry, ImageEffect
from ..core.precision import Fp32Buffers
from ..core.tables import ComputedTable, held
from ..errors import UnsupportedCell
from .base import Scheme, register_scheme
from .frequencies import default_frequencies

LAYOUTS = ("interleaved", "concatenated")


def sinusoids(positions: Tensor, inv_freq: Tensor, layout: str) -> Tensor:
    """sin and cos of position * frequency: neighbours (interleaved) or all sines, then all cosines."""
    angles = positions[..., None].float() * inv_freq
    pair = (angles.sin(), angles.cos())
    return torch.stack(pair, -1).flatten(-2) if layout == "interleaved" else torch.cat(pair, -1)


def axis_sinusoids(positions: Tensor, inv_freq: Tensor, layout: str) -> Tensor:
    """The sinusoids of one axis after the other: (..., axes) and (axes, pairs) -> (..., 2 * axes * pairs)."""
    return torch.cat([sinusoids(positions[..., a], inv_freq[a], layout) for a in range(len(inv_freq))], -1)


class GridSinusoids(Fp32Buffers):
    """A vector per patch of an image, computed for any number of rows and columns: first its x, then its y."""

    posenc_frequencies: Tensor

    def __init__(self, inv_freq: Tensor, layout: str, kind: str = "log", trained: bool = False):
        super().__init__()
        self.layout, self.kind = layout, kind
        self.posenc_frequencies = held(inv_freq, saved=kind != "log", trained=trained)

    def forward(self, rows: int, columns: int) -> Tensor:
        here = coordinates(rows, columns, self.posenc_frequencies.device)
        return axis_sinusoids(here, self.posenc_frequencies, self.layout)

    def extra_repr(self) -> str:
        axes, pairs = self.posenc_frequencies.shape
        return f"axes={axes}, size={2 * axes * pairs}, frequencies={self.kind}, layout={self.layout}"


def log_frequencies(size: int, axes: int, base: float) -> Tensor:
    """base^(-2i/n), n channels for each axis: (axes, n/2)."""
    return torch.tensor([default_frequencies(size // axes, base)] * axes)


def refuse_odd(size: int, axes: int) -> None:
    if size % (2 * axes):
        raise UnsupportedCell(
            f"Sinusoids come in pairs for each of {axes} axes, and this model's hidden size {size} is not a multiple "
            f"of {2 * axes}."
        )


class SinusoidTable(ComputedTable):
    inv_freq: Tensor

    def __init__(self, size: int, base: float, layout: str, rows: int | None, like: Tensor):
        super().__init__(size, rows, like)
        self.base, self.layout = base, layout
        frequencies = torch.tensor(default_frequencies(size, base), device=like.device)
        self.inv_freq = nn.Buffer(frequencies, persistent=False)

    def extra_repr(self) -> str:
        return f"size={self.size}, base={self.base:g}, layout={self.layout}"

    def vectors(self, positions: Tensor) -> Tensor:
        return sinusoids(positions, self.inv_freq, self.layout)


@register_scheme
@dataclass(frozen=True, kw_only=True)
class Sinusoidal(Scheme):
    """Adds sin and cos of the position to the input, frequencies base^(-2i/hidden_size)."""

    name = "sinusoidal"
    summary = "sines and cosines added to the input"
    adds_to_input = True

    base: float = 10_000.0
    layout: str = "interleaved"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_number("base", above=1.0)
        self._check_choice("layout", LAYOUTS)

    def effect(self, geometry: Geometry) -> Effect:
        if geometry.hidden_size % 2:
            raise UnsupportedCell(
                f"Sinusoids come in pairs, and this model's hidden size {geometry.hidden_size} is odd. "
                "Use a scheme that adds nothing to the input, such as 'alibi'."
            )
        return Effect(table=_Source(self, geometry))

    def on_images(self, geometry: Geometry) -> ImageEffect:
        axes = len(geometry.grid)
        refuse_odd(geometry.hidden_size, axes)
        return ImageEffect(table=GridSinusoids(log_frequencies(geometry.hidden_size, axes, self.base), self.layout))


@dataclass(frozen=True)
class _Source:
    scheme: Sinusoidal
    geometry: Geometry
    reads_native: bool = False

    def module(self, native: nn.Embedding | None, like: Tensor) -> nn.Module:
        rows = None if native is None else self.scheme.span(self.geometry).target
        size = self.geometry.hidden_size if native is None else native.embedding_dim
        return SinusoidTable(size, self.scheme.base, self.scheme.layout, rows, like)

    restored = module
