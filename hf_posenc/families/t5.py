"""T5 and similar models: a learned bias for each bucket of distances, which attention takes as an argument."""

from typing import Any

from .base import Family, register_family


def placeholder(value: Any) -> Any:
    """A value other than None, so that a layer does not make its own bias. A patched layer never reads it."""
    return ()


register_family(
    Family(
        name="t5",
        model_types=("t5", "mt5", "umt5", "switch_transformers"),
        positions="bias",
        stacks=("encoder", "decoder"),
        length="n_positions",
        bias="position_bias",
        blank=placeholder,
    )
)
