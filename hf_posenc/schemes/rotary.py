"""Base classes of schemes that rotate q and k by fixed frequencies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..core.effects import Effect, Geometry, Rotation
from .base import Scheme
from .frequencies import base_frequencies, longrope_parameters


@dataclass(frozen=True, kw_only=True)
class RotaryScheme(Scheme):
    """Rotates q and k by their position. `rope_theta` defaults to the model's own, or to 10,000 if it has none."""

    keeps: ClassVar[tuple[str, ...]] = ("RoPE",)

    rope_theta: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_number("rope_theta", above=1.0)

    def theta(self, geometry: Geometry) -> float:
        if self.rope_theta is not None:
            return float(self.rope_theta)
        return float(geometry.rope["rope_theta"]) if geometry.rope else 10_000.0


@dataclass(frozen=True, kw_only=True)
class RescaledRope(RotaryScheme):
    """Changes the model's frequencies by a fixed map, to extend its context beyond the trained length."""

    extends = True
    rescales = True

    def effect(self, geometry: Geometry) -> Effect:
        theta = self.theta(geometry)
        inv_freq, scaling = base_frequencies(geometry, self.rope_theta)
        reach = self.span(geometry)
        assert reach.factor is not None
        scaled = self.rescale(inv_freq, reach.factor, reach.trained)
        attention = self.attention_factor_for(reach.factor, reach.trained)
        told = self.read_by_layers() or None
        if geometry.rope is None or geometry.rope.get("rope_type", "default") == "default":
            written = self.rope_parameters(reach.factor, reach.trained, geometry)
            parameters: dict[str, Any] | None = {"rope_theta": theta, **written}
        else:  # a RoPE that is scaled already
            parameters = longrope_parameters(geometry, scaled, attention * scaling, reach) if min(scaled) > 0 else None
        rotation = Rotation(
            inv_freq=scaled,
            attention_scaling=attention * scaling,
            rope_parameters=parameters,
            read_by_layers=told,
        )
        return Effect(rotation=rotation)

    def rescale(self, inv_freq: Sequence[float], factor: float, length: int) -> tuple[float, ...]:
        raise NotImplementedError

    def attention_factor_for(self, factor: float, length: int) -> float:
        return 1.0

    def read_by_layers(self) -> dict[str, Any]:
        """Further `rope_parameters` keys that attention layers of some families read by themselves."""
        return {}

    def rope_parameters(self, factor: float, length: int, geometry: Geometry) -> dict[str, Any]:
        """The map as `config.rope_parameters`, for a model whose RoPE is plain."""
        raise NotImplementedError
