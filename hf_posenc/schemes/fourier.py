"""Fourier features of the position, added to the input: fixed, random (Tancik et al. 2020) or learned frequencies."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..core.effects import Effect, Geometry, ImageEffect
from ..core.tables import ComputedTable, held
from .base import Scheme, register_scheme
from .sinusoidal import LAYOUTS, GridSinusoids, axis_sinusoids, log_frequencies, refuse_odd

LOG, GAUSSIAN, LEARNED = "log", "gaussian", "learned"
FREQUENCIES = (LOG, GAUSSIAN, LEARNED)


def gaussian_frequencies(size: int, axes: int, sigma: float, seed: int) -> Tensor:
    """Normal numbers with standard deviation sigma, in radians per step: (axes, pairs)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(axes, size // (2 * axes), generator=generator) * sigma


class FourierTable(ComputedTable):
    """Of the position in a text: one axis. Random and learned frequencies are saved with the model."""

    posenc_frequencies: Tensor

    def __init__(self, inv_freq: Tensor, scheme: Fourier, rows: int | None, like: Tensor):
        super().__init__(2 * inv_freq.numel(), rows, like)
        self.kind, self.layout = scheme.frequencies, scheme.layout
        saved = self.kind != LOG
        self.posenc_frequencies = held(inv_freq.to(like.device), saved, trained=self.kind == LEARNED)

    def extra_repr(self) -> str:
        return f"size={self.size}, frequencies={self.kind}, layout={self.layout}"

    def vectors(self, positions: Tensor) -> Tensor:
        return axis_sinusoids(positions[..., None], self.posenc_frequencies, self.layout)


@register_scheme
@dataclass(frozen=True, kw_only=True)
class Fourier(Scheme):
    """Adds sin and cos of the position to the input, along one axis or several, an equal part of the channels each.

    `frequencies`: "log" (those of `sinusoidal`, from `base`), "gaussian" (random, from `seed`, with standard deviation
    `sigma` in radians per token or patch) or "learned" (trained, and "log" at first).
    """

    name = "fourier"
    summary = "sines and cosines of fixed, random or learned frequencies, of one axis or more"
    adds_to_input = True
    example = {"frequencies": "learned", "base": 100.0}

    frequencies: str = LOG
    base: float = 10_000.0
    sigma: float = 1.0
    seed: int = 0
    layout: str = "interleaved"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choice("frequencies", FREQUENCIES)
        self._check_choice("layout", LAYOUTS)
        self._check_number("base", above=1.0)
        self._check_number("sigma", above=0.0)
        self._check_seed("seed")

    def values(self, size: int, axes: int) -> Tensor:
        """The frequencies of each axis, (axes, pairs); those that are learned start so."""
        refuse_odd(size, axes)
        if self.frequencies == GAUSSIAN:
            return gaussian_frequencies(size, axes, self.sigma, self.seed)
        return log_frequencies(size, axes, self.base)

    def effect(self, geometry: Geometry) -> Effect:
        refuse_odd(geometry.hidden_size, 1)
        return Effect(table=_Source(self, geometry))

    def on_images(self, geometry: Geometry) -> ImageEffect:
        values = self.values(geometry.hidden_size, len(geometry.grid))
        learned = self.frequencies == LEARNED
        return ImageEffect(table=GridSinusoids(values, self.layout, self.frequencies, learned))


@dataclass(frozen=True)
class _Source:
    scheme: Fourier
    geometry: Geometry
    reads_native: bool = False

    def module(self, native: nn.Embedding | None, like: Tensor) -> nn.Module:
        rows = None if native is None else self.scheme.span(self.geometry).target
        size = self.geometry.hidden_size if native is None else native.embedding_dim
        return FourierTable(self.scheme.values(size, 1), self.scheme, rows, like)

    restored = module
