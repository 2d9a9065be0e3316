"""The maths of rotary frequencies, on plain numbers.

A frequency is the angle, in radians, by which a pair of channels rotates from one token to the next. Every rescaling
maps a model's present frequencies to new ones, so that it also works on a model that is already scaled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.effects import Geometry, Span
from ..errors import PosencError, UnsupportedCell

Frequencies = tuple[float, ...]


def default_frequencies(dim: int, theta: float) -> Frequencies:
    """theta^(-2i/dim) for each of the dim/2 pairs."""
    return tuple(theta ** (-2 * i / dim) for i in range(dim // 2))


def linear_frequencies(inv_freq: Sequence[float], factor: float) -> Frequencies:
    """All frequencies divided by the factor, which squeezes positions into the trained range."""
    return tuple(f / factor for f in inv_freq)


def ntk_weights(pairs: int) -> Frequencies:
    """The share of the stretch that each pair takes: none for the first, all of it for the last."""
    return tuple(i / (pairs - 1) if pairs > 1 else 0.0 for i in range(pairs))


def ntk_frequencies(inv_freq: Sequence[float], alpha: float) -> Frequencies:
    """The frequencies after theta is multiplied by alpha^(d/(d-2)): the last pair slows by alpha, the first not."""
    return tuple(f * alpha**-w for f, w in zip(inv_freq, ntk_weights(len(inv_freq)), strict=True))


def covering_alpha(inv_freq: Sequence[float], factor: float, length: int) -> float:
    """The alpha that stretches every wave longer than `length` by at least `factor`.

    Pair i of n is stretched by alpha^(i/(n-1)), so that the fastest of these waves decides.
    """
    first = next((i for i, f in enumerate(inv_freq) if f * length < 2 * math.pi), len(inv_freq) - 1)
    return float(factor ** ((len(inv_freq) - 1) / max(first, 1)))


def ntk_theta(theta: float, alpha: float, dim: int) -> float:
    """The theta whose plain frequencies are `ntk_frequencies`."""
    return float(theta * alpha ** (dim / (dim - 2)))


def pair_index(inv_freq: Sequence[float], turns: float, length: int) -> float:
    """The (fractional) pair that makes `turns` turns within `length` tokens, on a log scale between pairs."""
    wanted = math.log(turns * 2 * math.pi / length)
    logs = [math.log(f) for f in inv_freq if f > 0]
    if len(logs) < 2:
        return 0.0
    # Frequencies fall: the first segment that ends below the wanted one has the index. Outer segments extrapolate.
    i = next((i for i in range(len(logs) - 2) if logs[i + 1] <= wanted), len(logs) - 2)
    slope = logs[i + 1] - logs[i]
    return i + (wanted - logs[i]) / slope if slope else float(i)


def yarn_frequencies(
    inv_freq: Sequence[float], factor: float, length: int, beta_fast: float, beta_slow: float, truncate: bool
) -> Frequencies:
    """Keep pairs that turn more than beta_fast times within `length`; slow those below beta_slow turns by factor.

    Between them the ramp is linear in the pair's index, as in the authors' code, and not in turns as in their paper.
    """
    low, high = pair_index(inv_freq, beta_fast, length), pair_index(inv_freq, beta_slow, length)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * len(inv_freq) - 1)
    if low == high:
        high += 0.001
    slowed = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(len(inv_freq))]
    return tuple(f / factor * w + f * (1 - w) for f, w in zip(inv_freq, slowed, strict=True))


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """The factor for cos and sin that keeps attention sharp over more tokens."""

    def scale(m: float) -> float:
        return 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0

    if mscale and mscale_all_dim:
        return scale(mscale) / scale(mscale_all_dim)
    return scale(1.0)


def llama3_frequencies(
    inv_freq: Sequence[float], factor: float, length: int, low_freq_factor: float, high_freq_factor: float
) -> Frequencies:
    """Slow waves longer than length/low by factor, keep those shorter than length/high, and interpolate between."""

    def rescale(f: float) -> float:
        turns = length * f / (2 * math.pi)
        kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
        kept = min(max(kept, 0.0), 1.0)
        return (1 - kept) * f / factor + kept * f

    return tuple(rescale(f) for f in inv_freq)


def longrope_frequencies(inv_freq: Sequence[float], factors: Sequence[float]) -> Frequencies:
    return tuple(f / s for f, s in zip(inv_freq, factors, strict=True))


def longrope_attention_factor(factor: float, length: int) -> float:
    return math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0


def proportional_frequencies(dim: int, theta: float, portion: float, factor: float) -> Frequencies:
    """Plain frequencies divided by the factor for the fastest `portion` of the pairs, and 0 for the others."""
    rotating = int(portion * dim // 2)
    return tuple(f / factor if i < rotating else 0.0 for i, f in enumerate(default_frequencies(dim, theta)))


def _default(rope: Mapping[str, Any], dim: int) -> tuple[Frequencies, float]:
    return default_frequencies(dim, rope["rope_theta"]), 1.0


def _linear(rope: Mapping[str, Any], dim: int) -> tuple[Frequencies, float]:
    return linear_frequencies(_default(rope, dim)[0], rope["factor"]), 1.0


def _yarn(rope: Mapping[str, Any], dim: int) -> tuple[Frequencies, float]:
    factor = rope["factor"]
    inv_freq = yarn_frequencies(
        _default(rope, dim)[0],
        factor,
        rope["original_max_position_embeddings"],
        rope.get("beta_fast") or 32,
        rope.get("beta_slow") or 1,
        rope.get("truncate", True),
    )
    given = rope.get("attention_factor")
    computed = yarn_attention_factor(factor, rope.get("mscale"), rope.get("mscale_all_dim"))
    return inv_freq, computed if given is None else given


def _llama3(rope: Mapping[str, Any], dim: int) -> tuple[Frequencies, float]:
    length = rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    return llama3_frequencies(_default(rope, dim)[0], rope["factor"], length, low, high), 1.0


def _longrope(rope: Mapping[str, Any], dim: int) -> tuple[Frequencies, float]:
    if rope["short_factor"] != rope["long_factor"]:
        raise UnsupportedCell(
            "The model's own RoPE is 'longrope', whose angles change with the length, and cannot be scaled further. "
            "Pass existing='replace' to start again from the RoPE that it was trained with first."
        )
    length = rope["original_max_position_embeddings"]
    given = rope.get("attention_factor")
    computed = longrope_attention_factor(rope.get("factor") or 1.0, length)
    return longrope_frequencies(_default(rope, dim)[0], rope["long_factor"]), computed if given is None else given


def _proportional(rope: Mapping[str, Any], dim: int) -> tuple[Frequencies, float]:
    portion = rope.get("partial_rotary_factor", 1.0)
    return proportional_frequencies(dim, rope["rope_theta"], portion, rope.get("factor", 1.0)), 1.0


PRESENT = {
    "default": _default,
    "linear": _linear,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
    "proportional": _proportional,
}
"""The function that reads each `rope_type` of `rope_parameters`: (frequencies, attention factor)."""


def present_frequencies(rope: Mapping[str, Any], dim: int) -> tuple[Frequencies, float]:
    """The frequencies and the attention factor that a model's own `rope_parameters` describe."""
    kind = rope.get("rope_type", "default")
    if not isinstance(kind, str) or kind not in PRESENT:
        raise UnsupportedCell(
            f"The model's own RoPE is of type {kind!r}, which cannot be scaled further. Supported: "
            f"{', '.join(PRESENT)}. Pass existing='replace' to start again from plain RoPE with the model's theta."
        )
    try:
        return PRESENT[kind](rope, dim)
    except PosencError:
        raise
    except (KeyError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:  # malformed numbers
        raise PosencError(
            f"The frequencies of the model's own {kind!r} RoPE cannot be computed ({type(error).__name__}: {error}) "
            f"from its rope_parameters: {dict(rope)}. Correct the config."
        ) from None


MSCALES = ("short_mscale", "long_mscale")
"""The keys in which vLLM reads the attention factor of a `longrope`."""


def longrope_parameters(geometry: Geometry, inv_freq: Sequence[float], scaling: float, reach: Span) -> dict[str, Any]:
    """Any fixed frequencies as `rope_parameters`: a `longrope` with one list of factors for all lengths."""
    assert geometry.rope is not None
    theta = float(geometry.rope["rope_theta"])
    plain = default_frequencies(2 * len(inv_freq), theta)
    factors = [p / f for p, f in zip(plain, inv_freq, strict=True)]
    return {
        "rope_type": "longrope",
        "rope_theta": theta,
        "short_factor": factors,
        "long_factor": factors,
        "factor": reach.factor,
        "attention_factor": scaling,
        **dict.fromkeys(MSCALES, scaling),
        "original_max_position_embeddings": reach.trained,
    }


def rotary_dim(geometry: Geometry) -> int:
    """The number of channels to rotate; raises if it is not even."""
    if geometry.rotary_dim % 2 or geometry.rotary_dim < 2:
        raise UnsupportedCell(
            f"RoPE rotates channels in pairs, and this model's heads have {geometry.rotary_dim}: an even number "
            "is needed. Use a scheme that does not rotate, such as 'alibi' or 'sinusoidal'."
        )
    return geometry.rotary_dim


def refuse_degenerate(geometry: Geometry) -> None:
    """Raise if there are too few pairs, or too short a length, to tell fast pairs from slow ones."""
    if rotary_dim(geometry) < 4 or geometry.trained_length < 2:
        raise UnsupportedCell(
            "This scaling needs at least two pairs of channels to rotate and a trained length of 2; this model's "
            f"heads have {geometry.rotary_dim} channels and it was trained at {geometry.trained_length}. Use 'linear'."
        )


def base_frequencies(geometry: Geometry, rope_theta: float | None = None) -> tuple[Frequencies, float]:
    """The frequencies and attention factor to rescale: the model's own, or those of plain RoPE if it has none."""
    dim = rotary_dim(geometry)
    if geometry.rope is None:
        return default_frequencies(dim, rope_theta or 10_000.0), 1.0
    if rope_theta is not None:
        if geometry.rope.get("rope_type", "default") != "default":
            raise PosencError(
                f"rope_theta={rope_theta:g} contradicts the model's own {geometry.rope['rope_type']!r} RoPE, which "
                "the scheme would extend. Leave rope_theta out, or pass existing='replace'."
            )
        return default_frequencies(dim, rope_theta), 1.0
    return present_frequencies(geometry.rope, dim)
