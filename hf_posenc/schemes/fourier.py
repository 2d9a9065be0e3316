"""Fourier features of the position, added to the input: fixed, random (Tancik et al. 2020) or learned frequencies."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.axes import ANY_AXES
from ..core.effects import ComputedSource, Effect, Geometry
from .base import Scheme, register_scheme
from .sinusoidal import FREQUENCIES, GAUSSIAN, LAYOUTS, LOG, SinusoidTable, log_frequencies, refuse_odd


def gaussian_frequencies(size: int, axes: int, sigma: float, seed: int) -> Tensor:
    """Random frequencies with standard deviation sigma, in radians per token or patch: (axes, pairs)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(axes, size // (2 * axes), generator=generator) * sigma


@register_scheme
@dataclass(frozen=True, kw_only=True)
class Fourier(Scheme):
    """Adds sin and cos of the position to the input. Each axis has an equal share of the channels.

    `frequencies` is "log" (those of `sinusoidal`, from `base`), "gaussian" (random, from `seed`, with standard
    deviation `sigma` in radians per token or patch) or "learned" (trained, starting as "log").
    """

    name = "fourier"
    summary = "sines and cosines of fixed, random or learned frequencies, of one axis or more"
    adds_to_input = True
    axes = ANY_AXES
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
        """The frequencies of each axis, (axes, pairs); learned ones start with these."""
        refuse_odd(size, axes)
        if self.frequencies == GAUSSIAN:
            return gaussian_frequencies(size, axes, self.sigma, self.seed)
        return log_frequencies(size, axes, self.base)

    def effect(self, geometry: Geometry) -> Effect:
        refuse_odd(geometry.hidden_size, geometry.axes)

        def table(size: int, rows: int | None, like: Tensor) -> SinusoidTable:
            return SinusoidTable(self.values(size, geometry.axes), self.frequencies, self.layout, rows, like)

        return Effect(table=ComputedSource(table, geometry, self.span(geometry).target))
