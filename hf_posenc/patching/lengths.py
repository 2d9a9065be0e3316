"""How long a text a model was trained on, and where its positions end."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import PosencError, UnsupportedModel
from ..families import Places, places
from .patch_state import record_of, unwrap_model
from .sizes import config_length
from .tables import live_table


def trained_length(model: Any) -> int:
    """The length of the texts that a model was trained on, before its patch if it has one."""
    inner = unwrap_model(model)
    where, record = places_or_none(inner), record_of(inner)
    if where is None:
        length = getattr(inner.config, "max_position_embeddings", None)
    elif record is not None and record.geometry.axes == 1:
        length = record.geometry.trained_length
    else:
        length = config_length(where)
    if not isinstance(length, int):
        raise PosencError(f"The config of {type(inner).__name__} does not say at which length the model was trained.")
    return length


def reach(model: Any) -> int | None:
    """Where the positions of a model end; None where they do not end, or where that is not known."""
    where = places_or_none(unwrap_model(model))
    for stack in where.stacks if where else []:
        table: Any = None if stack.grid else live_table(stack)
        if isinstance(table, nn.Embedding):
            return table.num_embeddings - stack.offset
    return None


def refuse_beyond_reach(model: Any, length: int) -> None:
    end = reach(model)
    if end is not None and length > end:
        raise PosencError(
            f"{type(unwrap_model(model)).__name__} has a table of {end} positions and cannot read {length} tokens. "
            f"Take lengths up to {end}, or patch it with a scheme that reaches further."
        )


def places_or_none(model: Any) -> Places | None:
    """Where positions enter a model; None for a model that cannot be patched, which may still be evaluated."""
    try:
        return places(model)
    except UnsupportedModel:
        return None
