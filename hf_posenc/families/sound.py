"""Whether a config holds what a model could mean: a script or a damaged file may have left anything in it."""

from __future__ import annotations

from typing import Any

from ..errors import PosencError, UnsupportedModel

DEEPEST = 100
"""Configs in use are nested a few levels deep; copying and writing them recurses."""
LARGEST = 2**40
COUNTS = ("hidden_size", "num_attention_heads", "head_dim")
LENGTHS = ("max_position_embeddings",)


def refuse_unsound(config: Any) -> None:
    """Raise where a config, or its part about text, cannot be worked with."""
    kind = config.model_type
    if not isinstance(kind, str):
        raise UnsupportedModel(f"model_type in the config should be a name, and is a {type(kind).__name__}.")
    _refuse_depth(vars(config))
    for part in (config, config.get_text_config()):
        for name in (*COUNTS, *LENGTHS):
            value = getattr(part, name, None)
            if isinstance(value, int) and (value > LARGEST or (name in COUNTS and value < 1)):
                raise PosencError(
                    f"{name} in the config of this {part.model_type!r} model is "
                    f"{'more than 2**40' if value > LARGEST else value}: no model has that. Correct the config."
                )


def _refuse_depth(values: dict[str, Any]) -> None:
    """Level by level, not by recursion; an object that holds itself is seen once."""
    level: list[Any] = list(values.values())
    seen: set[int] = set()
    for _ in range(DEEPEST):
        found = [held for held in level if isinstance(held, (dict, list, tuple)) and id(held) not in seen]
        seen.update(map(id, found))
        level = [inner for held in found for inner in (held.values() if isinstance(held, dict) else held)]
        if not level:
            return
    raise PosencError(
        f"The config is nested more than {DEEPEST} levels deep: no model needs that. Correct the config."
    )
