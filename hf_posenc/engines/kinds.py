"""The kinds of positions that a checkpoint can have for another runtime.

A runtime sees only the config and not the scheme that was patched in: `ntk` is RoPE with another theta to it, and a
RoPE that was scaled twice is a `longrope`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

KINDS = {
    "plain": "RoPE of theta 10000",
    "theta": "RoPE of another theta (`rope`, `ntk`)",
    "linear": "RoPE, every pair slowed by one factor",
    "yarn": "YaRN with the attention factor and betas of its paper",
    "yarn-attention": "YaRN with an attention factor of its own (`attention_factor`, `mscale`)",
    "yarn-betas": "YaRN with other betas, or not truncated",
    "llama3": "RoPE, long waves interpolated",
    "longrope": "a factor for each pair (RoPE scaled twice, LongRoPE)",
    "dynamic": "theta that follows the length, by the runtime's own code",
    "proportional": "RoPE on the fastest pairs only",
    "none": "a RoPE that does not rotate",
    "mixed": "a RoPE for each type of layer",
    "listed": "RoPE in the layers of a list that a plan has written (`no_rope_layers`)",
    "table": "a position table in the weights",
    "sealed": "what only hf_posenc computes",
    "own": "the family's own positions, neither RoPE nor table",
}
"""The values of the column `kind` in `runtimes.json`, with what each means."""
LISTED = "listed"
SCHEME = "posenc.scheme="
"""The start of a key that names the scheme of a patch."""
USUAL_THETA = 10_000.0
"""The theta that runtimes use if the config has none."""
STILL = 1e20
"""With a larger `factor`, RoPE rotates by nothing that a float could show."""


def kind_of_rope(rope: Mapping[str, Any]) -> str:
    """One of `KINDS` for `rope_parameters`, or for one such dictionary per layer type. Values may be malformed."""
    inner = [value for value in rope.values() if isinstance(value, Mapping)]
    if inner and "rope_theta" not in rope and "rope_type" not in rope:
        kinds = {kind_of_rope(value) for value in inner}
        return kinds.pop() if len(kinds) == 1 else "mixed"
    named = rope.get("rope_type", rope.get("type", "default"))
    if named == "default":
        return "plain" if number(rope.get("rope_theta")) in (None, USUAL_THETA) else "theta"
    if named == "yarn":
        return _kind_of_yarn(rope)
    if named in ("linear", "proportional") and _is_still(rope):
        return "none"
    return named if named in KINDS else "sealed"


def keys_of(config: Mapping[str, Any]) -> set[str]:
    """The keys of a config, with those of its `rope_parameters` written as "rope_parameters.factor".

    The scheme of a patch is one as well: "posenc.scheme=alibi".
    """
    rope, posenc = config.get("rope_parameters"), config.get("posenc")
    scheme = [f"{SCHEME}{posenc.get('scheme')}"] if isinstance(posenc, Mapping) else []
    return {*config, *(f"rope_parameters.{key}" for key in (rope if isinstance(rope, Mapping) else ())), *scheme}


def is_scheme(key: str) -> bool:
    """Whether one of these keys names the scheme of a patch."""
    return key.startswith(SCHEME)


def _is_still(rope: Mapping[str, Any]) -> bool:
    return rope.get("partial_rotary_factor") == 0 or (number(rope.get("factor")) or 1.0) > STILL


def _kind_of_yarn(rope: Mapping[str, Any]) -> str:
    usual = {"beta_fast": 32.0, "beta_slow": 1.0}
    if any(number(rope.get(key, value)) not in (None, value) for key, value in usual.items()):
        return "yarn-betas"
    if rope.get("truncate", True) is False:
        return "yarn-betas"
    factor, given = number(rope.get("factor")) or 1.0, number(rope.get("attention_factor"))
    if given is None:
        given = number(rope.get("mscale")) and math.nan  # a ratio of two mscales counts as a factor of its own
    expected = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    return "yarn" if given is None or math.isclose(given, expected, rel_tol=1e-4) else "yarn-attention"


def number(value: Any) -> float | None:
    """A finite number as a float; None for any other value."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None
