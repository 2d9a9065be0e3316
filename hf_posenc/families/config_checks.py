"""Checks that a config holds values which a model can have: a script or a damaged file may have put anything there."""

from __future__ import annotations

from typing import Any

from ..compat.models import value_of
from ..errors import PosencError, UnsupportedModel

DEEPEST = 100
"""Real configs are nested a few levels deep. A much deeper one breaks code that copies or writes it by recursion."""
LARGEST = 2**40
COUNTS = ("hidden_size", "num_attention_heads", "head_dim")
LENGTHS = ("max_position_embeddings",)


def check_config(config: Any) -> None:
    """Raise where a config, or the part of it about text, cannot be used."""
    kind = config.model_type
    if not isinstance(kind, str):
        raise UnsupportedModel(f"model_type in the config should be a name, and is a {type(kind).__name__}.")
    _check_depth(vars(config))
    for part in (config, config.get_text_config()):
        for name in (*COUNTS, *LENGTHS):
            value = value_of(part, name)
            if isinstance(value, int) and (value > LARGEST or (name in COUNTS and value < 1)):
                raise PosencError(
                    f"{name} in the config of this {part.model_type!r} model is "
                    f"{'more than 2**40' if value > LARGEST else value}: no model has that. Correct the config."
                )


def _check_depth(values: dict[str, Any]) -> None:
    """Goes level by level instead of by recursion, and looks once at an object that contains itself."""
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
