"""How long a text a model was trained on, and where its positions end."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import PosencError, UnsupportedModel
from ..families import Places, places
from .describe import bare, describe, live_table
from .measure import own_length
from .patch import is_patched


def trained_length(model: Any) -> int:
    inner = bare(model)
    where = found_places(inner)
    if is_patched(inner) or where is None:
        known = getattr(describe(model), "trained_length", None)  # which a model of images has not
        length = known if where else getattr(inner.config, "max_position_embeddings", None)
    else:
        length = own_length(where)
    if not isinstance(length, int):
        raise PosencError(f"The config of {type(inner).__name__} does not say at which length the model was trained.")
    return length


def reach(model: Any) -> int | None:
    """Where the positions of a model end; None if they do not, or that is not known."""
    where = found_places(bare(model))
    for stack in where.stacks if where else []:
        table: Any = live_table(stack)
        if isinstance(table, nn.Embedding):
            return table.num_embeddings - stack.family.offset(stack.config)
    return None


def refuse_beyond_reach(model: Any, length: int) -> None:
    end = reach(model)
    if end is not None and length > end:
        raise PosencError(
            f"{type(bare(model)).__name__} has a table of {end} positions and cannot read {length} tokens. Take "
            f"lengths up to {end}, or patch it with a scheme that reaches further."
        )


def found_places(model: Any) -> Places | None:
    """Where positions enter a model; None for one that cannot be patched, but evaluated all the same."""
    try:
        return places(model)
    except UnsupportedModel:
        return None
