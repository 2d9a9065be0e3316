"""RoPE without its slowest pairs: those that do not finish a wave within the trained length, or a given number.

FoPE (Hua et al. 2024) and HoPE (Chen et al. 2024) stop slow pairs; CoPE (2026) fades out a given number of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..core.effects import Effect, Geometry, Rotation
from ..errors import PosencError
from .base import register_scheme
from .frequencies import Frequencies, base_frequencies, proportional_frequencies
from .rotary import RotaryScheme


def clip_frequencies(inv_freq: Frequencies, pairs: int, taper: bool) -> Frequencies:
    """Set the last `pairs` frequencies to 0. With `taper` multiply them by (1 + cos t)/2 instead, where t goes from 0
    at the first of them to pi at the last."""
    first = len(inv_freq) - pairs

    def share(i: int) -> float:
        if not taper:
            return 0.0
        return (1 + math.cos(math.pi * (i - first) / (pairs - 1))) / 2 if pairs > 1 else 1.0

    return tuple(f if i < first else f * share(i) for i, f in enumerate(inv_freq))


def count_unfinished(inv_freq: Frequencies, length: int) -> int:
    """The number of slowest pairs whose waves are longer than the text."""
    whole = [2 * math.pi / f <= length if f > 0 else False for f in inv_freq]
    return len(whole) - max((i + 1 for i, seen in enumerate(whole) if seen), default=0)


@register_scheme
@dataclass(frozen=True, kw_only=True)
class Clip(RotaryScheme):
    """Stops the rotation of pairs that do not finish a wave within the trained length.

    `pairs` gives the number of slowest pairs to stop instead (CoPE: 20 of 64). `taper` fades them out instead of
    stopping them.
    """

    name = "clip"
    summary = "RoPE without its slowest pairs, cut off or faded out"
    keeps = ()  # a trained model uses the slow pairs that this one stops
    rescales = True

    pairs: int | None = None
    taper: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_flag("taper")
        if self.pairs != 0:
            self._check_count("pairs")

    def effect(self, geometry: Geometry) -> Effect:
        inv_freq, scaling = base_frequencies(geometry, self.rope_theta)
        pairs = count_unfinished(inv_freq, geometry.trained_length) if self.pairs is None else self.pairs
        if pairs > len(inv_freq):
            raise PosencError(f"pairs={pairs} is more than the {len(inv_freq)} pairs that this model rotates.")
        left = clip_frequencies(inv_freq, pairs, self.taper)
        rotation = Rotation(
            inv_freq=left, attention_scaling=scaling, rope_parameters=self._rope_parameters(geometry, left, pairs)
        )
        return Effect(rotation=rotation)

    def _rope_parameters(self, geometry: Geometry, left: Frequencies, pairs: int) -> dict[str, Any] | None:
        """The same as `rope_parameters`; None if transformers has none for it. Its "proportional" RoPE fits only plain
        RoPE that rotates whole heads."""
        theta, dim = self.theta(geometry), geometry.rotary_dim
        if geometry.rope is not None and geometry.rope.get("rope_type", "default") != "default":
            return None
        if pairs == 0:
            return {"rope_type": "default", "rope_theta": theta}
        if dim != geometry.head_dim:
            return None
        for channels in (2 * (dim // 2 - pairs), 2 * (dim // 2 - pairs) + 1):  # as transformers rounds the quotient
            portion = channels / dim
            if proportional_frequencies(dim, theta, portion, 1.0) == left:
                return {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": portion}
        return None
