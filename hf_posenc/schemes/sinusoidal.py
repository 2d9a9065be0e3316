"""Sinusoids added to the input (Vaswani et al. 2017), at any length."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..registry import UnsupportedCell
from ..sites import Effect, Geometry
from ..tables import ComputedTable
from .base import Scheme, register
from .frequencies import default_frequencies

LAYOUTS = ("interleaved", "concatenated")


def sinusoids(positions: Tensor, inv_freq: Tensor, layout: str) -> Tensor:
    """sin and cos of position * frequency: neighbours (interleaved) or all sines, then all cosines."""
    angles = positions[..., None].float() * inv_freq
    pair = (angles.sin(), angles.cos())
    return torch.stack(pair, -1).flatten(-2) if layout == "interleaved" else torch.cat(pair, -1)


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


@register
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
