"""LongRoPE (Ding et al. 2024): one factor per pair, with another list of factors past the trained length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..core.effects import Effect, FollowingRotation, Geometry, Rotation
from ..errors import PosencError
from .base import register_scheme
from .frequencies import (
    base_frequencies,
    longrope_attention_factor,
    longrope_frequencies,
    longrope_parameters,
    refuse_degenerate,
    yarn_frequencies,
)
from .option_checks import is_finite_number
from .rotary import RotaryScheme


@register_scheme
@dataclass(frozen=True, kw_only=True)
class LongRope(RotaryScheme):
    """Divides frequency i by short_factor[i] while a query sees at most the trained length, and by long_factor[i] past
    it.

    The lists come from a search on the model (`hf-posenc search`). By default the short factors are 1 and the long
    ones those of YaRN, a common start of that search. If both lists are equal, the angles do not depend on the length,
    and other runtimes can read them from the config.
    """

    name = "longrope"
    summary = "RoPE, a factor per pair, another set past the trained length"
    extends = True
    rescales = True
    follows = True
    nearest = "yarn"

    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_number("attention_factor", above=0.0)
        for name in ("short_factor", "long_factor"):
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, Sequence) or isinstance(value, str) or not all(map(is_finite_number, value)):
                raise PosencError(f"{name} must be a list of finite numbers, got {value!r}.")
            if min(value, default=1) <= 0:
                raise PosencError(f"{name} must hold numbers greater than 0, got {min(value)!r}.")
            object.__setattr__(self, name, tuple(float(x) for x in value))

    def effect(self, geometry: Geometry) -> Effect:
        refuse_degenerate(geometry)
        inv_freq, scaling = base_frequencies(geometry, self.rope_theta)
        reach = self.span(geometry)
        assert reach.factor is not None
        short = longrope_frequencies(inv_freq, self._factors("short_factor", (1.0,) * len(inv_freq)))
        yarn = yarn_frequencies(inv_freq, reach.factor, reach.trained, 32.0, 1.0, True)
        default = tuple(f / y if y else 1.0 for f, y in zip(inv_freq, yarn, strict=True))
        long = longrope_frequencies(inv_freq, self._factors("long_factor", default))
        if self.attention_factor is None:
            scaling *= longrope_attention_factor(reach.factor, reach.trained)
        else:
            scaling *= float(self.attention_factor)
        if short == long:  # nothing changes at the border: transformers' own longrope gives the same
            parameters = longrope_parameters(geometry, long, scaling, reach) if geometry.rope is not None else None
            return Effect(rotation=Rotation(inv_freq=long, attention_scaling=scaling, rope_parameters=parameters))
        return Effect(rotation=self._rotation(short, long, scaling, reach.trained))

    @staticmethod
    def _rotation(short: tuple[float, ...], long: tuple[float, ...], scaling: float, border: int) -> Rotation:
        weights = tuple(math.log(s / lo) if lo else 0.0 for s, lo in zip(short, long, strict=True))
        return FollowingRotation(inv_freq=short, attention_scaling=scaling, weights=weights, border=border, step=None)

    def _factors(self, name: str, default: tuple[float, ...]) -> tuple[float, ...]:
        given = getattr(self, name)
        if given is None:
            return default
        if len(given) != len(default):
            raise PosencError(
                f"{name} has {len(given)} numbers, and this model rotates {len(default)} pairs. Give one number for "
                "each pair."
            )
        return tuple(given)
