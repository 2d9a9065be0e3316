"""YaRN (Peng et al. 2023), as in the authors' code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..core.effects import Effect, Geometry
from ..core.ranges import Range
from ..errors import PosencError
from .base import register_scheme
from .frequencies import refuse_degenerate, yarn_attention_factor, yarn_frequencies
from .rotary import RescaledRope


@register_scheme
@dataclass(frozen=True, kw_only=True)
class Yarn(RescaledRope):
    """Keeps fast pairs, slows slow pairs by `factor`, interpolates between, and sharpens attention a little."""

    name = "yarn"
    summary = "RoPE, slow pairs interpolated, attention rescaled"

    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_number("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", above=0.0)
        self._check_flag("truncate")
        if self.beta_fast <= self.beta_slow:
            raise PosencError(
                f"beta_fast={self.beta_fast:g} must be greater than beta_slow={self.beta_slow:g}: pairs that rotate "
                "more often than beta_fast are kept, those that rotate less than beta_slow interpolated."
            )
        if (self.mscale is None) != (self.mscale_all_dim is None):
            raise PosencError("mscale and mscale_all_dim act as a ratio: give both or neither.")

    def effect(self, geometry: Geometry) -> Effect:
        refuse_degenerate(geometry)
        return super().effect(geometry)

    def ranges(self, geometry: Geometry) -> dict[str, Range]:
        return {
            "beta_fast": Range(6.0, 128.0, log=True),
            "beta_slow": Range(0.25, 5.0, log=True),
            "attention_factor": Range(0.9, 1.6),
        }

    def rescale(self, inv_freq: Sequence[float], factor: float, length: int) -> tuple[float, ...]:
        return yarn_frequencies(inv_freq, factor, length, self.beta_fast, self.beta_slow, self.truncate)

    def attention_factor_for(self, factor: float, length: int) -> float:
        if self.attention_factor is not None:
            return float(self.attention_factor)
        return yarn_attention_factor(factor, self.mscale, self.mscale_all_dim)

    def read_by_layers(self) -> dict[str, Any]:
        given = {"mscale": self.mscale, "mscale_all_dim": self.mscale_all_dim}
        return {key: float(value) for key, value in given.items() if value is not None}

    def rope_parameters(self, factor: float, length: int, geometry: Geometry) -> dict[str, Any]:
        # All keys are written, so that a runtime with other defaults computes the same.
        attention = self.attention_factor_for(factor, length)
        usual = yarn_attention_factor(factor)
        told = {"mscale": (attention - 1) / (usual - 1), "mscale_all_dim": 0.0} if attention != usual != 1 else {}
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": length,
            "beta_fast": float(self.beta_fast),
            "beta_slow": float(self.beta_slow),
            "truncate": self.truncate,
            "attention_factor": attention,
            **told,  # for runtimes that compute the attention factor from mscale
        }
