"""Adds a temperature to the effect of a scheme.

Where `rope_parameters` can express it, any transformers can run it. Otherwise attention multiplies queries by it.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ..core.effects import CoordinateRotation, Effect, Geometry, Rotation, Span
from ..core.temperatures import ConstantTemperature
from .frequencies import longrope_parameters
from .temperature import Ministral, TemperatureKind

BETA = "llama_4_scaling_beta"
"""The key of `rope_parameters` with which some models apply a temperature in their own code."""
NEARLY_STILL = 1e-30
"""A frequency so small that no float shows the rotation."""


def add_temperature(effect: Effect, kind: TemperatureKind, geometry: Geometry, reach: Span) -> Effect:
    """The effect with a temperature, which replaces one that the model's own code applies."""
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
    """The rotation with a constant temperature included: the attention factor scales q and k, so each by its root.

    None if rotary modules do not scale all channels of q and k, or if transformers could not express the rotation or
    run the rest of the effect.
    """
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
