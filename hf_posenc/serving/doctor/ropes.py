"""RoPE as configs say it, old and new, by type of layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...engines.kinds import number

SCALED = ("linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
ALIASES = {"su": "longrope", "mrope": "default"}
"""Older names of types."""
HELD = "original_max_position_embeddings"


def raw_ropes(section: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The sets of rope parameters that transformers would read: `rope_scaling`, where there is one, goes before
    `rope_parameters`. By type of layer, "" where all share one."""
    told = section.get("rope_scaling") or section.get("rope_parameters")
    if not isinstance(told, dict):
        return {}
    inner = {name: value for name, value in told.items() if isinstance(value, dict)}
    return inner if inner and "rope_type" not in told and "rope_theta" not in told else {"": told}


def scaled(section: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Those that scale, with the type of their layers as a phrase."""
    for name, rope in raw_ropes(section).items():
        if type_of(rope) in SCALED:
            yield (f" of {name!r} layers" if name else ""), rope


def type_of(rope: dict[str, Any]) -> str:
    named = rope.get("rope_type", rope.get("type", "default"))
    return ALIASES.get(named, named) if isinstance(named, str) else repr(named)


def theta_of(section: dict[str, Any], rope: dict[str, Any]) -> float | None:
    """What a reader of this file takes for theta, if it says any."""
    return number(rope.get("rope_theta")) or number(section.get("rope_theta"))


def original_of(section: dict[str, Any], rope: dict[str, Any]) -> float | None:
    return number(rope.get(HELD)) or number(section.get(HELD))


def length_of(section: dict[str, Any]) -> float | None:
    """What a config promises."""
    for key in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        found = number(section.get(key))
        if found is not None:
            return found
    return None
