"""What a temperature adds to an effect: said as transformers can say it, where it can, and else done in attention."""

from __future__ import annotations

import math
from dataclasses import replace

from ..core.effects import CoordinateRotation, Effect, Geometry, Rotation, Span
from ..core.temperatures import ConstantTemperature
from .frequencies import longrope_parameters
from .temperature import Ministral, TemperatureKind

BETA = "llama_4_scaling_beta"
"""The key of `rope_parameters` by which some models multiply queries in their own code."""
NEARLY_STILL = 1e-30
"""A frequency at which no float can tell a rotation from none."""


def add_temperature(effect: Effect, kind: TemperatureKind, geometry: Geometry, reach: Span) -> Effect:
    """The effect with a temperature, in the place of one that the model may have of its own."""
    rope = geometry.rope or {}
    own = rope.get("original_max_position_embeddings") if BETA in rope else None
    if isinstance(kind, Ministral) and own == kind.length(geometry):
        return replace(effect, own_temperature=float(kind.llama_4_scaling_beta))
    made = kind.on(geometry, reach)
    effect = replace(effect, own_temperature=0.0)
    if isinstance(made, ConstantTemperature):
        rotation = _fold_into_rotation(effect, made.numbers["factor"], geometry, reach)
        if rotation is not None:
            return replace(effect, rotation=rotation)
    return replace(effect, temperature=made)


def _fold_into_rotation(effect: Effect, factor: float, geometry: Geometry, reach: Span) -> Rotation | None:
    """A rotation that also does what a constant temperature does, since it scales q and k, each by its root; None
    where rotary modules do not scale all of q and k, or transformers could not say it or run the rest."""
    rotation = effect.rotation
    if not geometry.whole or effect.table is not None or effect.bias is not None or effect.pattern is not None:
        return None
    if rotation is None:
        pairs, scaling, said = (NEARLY_STILL,) * (geometry.rotary_dim // 2), math.sqrt(factor), {}
    elif isinstance(rotation, CoordinateRotation) or rotation.follows_length or rotation.rope_parameters is None:
        return None
    else:
        pairs, scaling = rotation.inv_freq, rotation.attention_scaling * math.sqrt(factor)
        said = dict(rotation.rope_parameters)
    if min(pairs) <= 0:
        return None
    if "attention_factor" in said:
        said["attention_factor"] = scaling
    else:
        said = longrope_parameters(geometry, pairs, scaling, reach)
    return Rotation(inv_freq=pairs, attention_scaling=scaling, rope_parameters=said)
