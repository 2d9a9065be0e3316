"""How a rotation is told to llama.cpp, or why it cannot be.

What counts there: `rope.freq_base`, one factor for each pair where an architecture reads them, else a linear or YaRN
factor, and `rope.scaling.attn_factor`, which multiplies cos and sin. Under YaRN the runtime multiplies by
1 + 0.1 ln(factor) as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from ...errors import UnsupportedCell
from ...schemes.frequencies import yarn_frequencies
from ..rotation import LiveRotation
from .architectures import FREQS, KEYS, LONG_SHORT, Architecture

NEAR = 2e-5
"""Frequencies agree when none differs by more than this part of it."""


@dataclass(frozen=True)
class RopeEntries:
    """Keys (after the architecture's name) and tensors of a GGUF file."""

    keys: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, tuple[float, ...]] = field(default_factory=dict)


def rope_entries(rotation: LiveRotation, architecture: Architecture, trained: int, scheme: str) -> RopeEntries:
    keys: dict[str, Any] = {"rope.freq_base": rotation.theta, "rope.scaling.attn_factor": rotation.attention_scaling}
    if architecture.rope == KEYS:
        return RopeEntries({**keys, **_scaling_keys(rotation, trained, architecture, scheme)})
    factors = rotation.factors()
    if max(abs(f - 1) for f in factors) < NEAR:
        return RopeEntries(keys)
    if architecture.rope == FREQS:
        return RopeEntries(keys, {"rope_freqs.weight": factors})
    assert architecture.rope == LONG_SHORT
    # The same for both: the runtime takes one or the other by the size of its context, not of the text.
    keys |= {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": trained}
    return RopeEntries(keys, {"rope_factors_long.weight": factors, "rope_factors_short.weight": factors})


def _scaling_keys(rotation: LiveRotation, trained: int, architecture: Architecture, scheme: str) -> dict[str, Any]:
    """The rotation as one number for all pairs, or as YaRN, whichever gives the live frequencies."""
    factors = rotation.factors()
    if max(factors) - min(factors) <= NEAR * max(factors):
        if abs(factors[0] - 1) < NEAR:
            return {}
        return {"rope.scaling.type": "linear", "rope.scaling.factor": factors[0]}
    given = rotation.parameters
    factor, original = given.get("factor"), given.get("original_max_position_embeddings", trained)
    own = (32.0, 1.0)  # the runtime reads no others from a file
    if given.get("rope_type") == "yarn" and factor is not None:
        theirs = yarn_frequencies(rotation.plain, factor, original, *own, truncate=True)
        if all(math.isclose(a, b, rel_tol=NEAR) for a, b in zip(theirs, rotation.inv_freq, strict=True)):
            return {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": float(factor),
                "rope.scaling.original_context_length": int(original),
                "rope.scaling.attn_factor": rotation.attention_scaling / (1 + 0.1 * math.log(factor)),
            }
    raise UnsupportedCell(
        f"llama.cpp reads no factor for each pair on {architecture.name!r} models. Under {scheme!r} this one has "
        "frequencies that no single theta or factor gives, nor YaRN with default betas and truncate on a plain RoPE. "
        "Patch the original model with 'ntk', 'linear', 'none' or 'yarn' as it is by default, and export that."
    )
