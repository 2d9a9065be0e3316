"""T5 and its kin: a learned bias per bucket of distances, which their attention takes as an argument."""

from typing import Any

from .base import Family, register_family


def placeholder(given: Any) -> Any:
    """Something that is not None, so that a layer does not make its own bias; a patched layer never reads it."""
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
