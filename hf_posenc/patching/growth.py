"""Which rows of a live table are new, so that training can be kept to them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.effects import OwnGrid, TableSource
from ..errors import PosencError
from ..families import Places, places
from .patch_state import record_of, unwrap_model
from .records import Record
from .tables import live_table


def new_rows(model: Any) -> dict[str, Tensor]:
    """By name of parameter, a mask over the rows that `learned` made new instead of taking them from a table.

    Names are those of `model.named_parameters()`. To tune only these rows, multiply the gradient by the mask:
    `parameter.register_hook(lambda grad: grad * mask[:, None].to(grad))`; and let no weight decay shrink the others.
    """
    inner = unwrap_model(model)
    where, record = places(inner), record_of(inner)
    source = _source(record)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    masks = {}
    for stack in where.stacks:
        new = None if source is None else source.new_rows(stack.table is not None and _had_table(record, where))
        if new is not None:
            table = live_table(stack)
            kept = torch.zeros(table.offset, dtype=torch.bool)  # rows before position 0 belong to the family
            masks[names[id(table.weight)]] = torch.cat([kept, new]).to(table.weight.device)
    if not masks:
        found = "is not patched" if record is None else f"is patched with {record.scheme.name!r}"
        raise PosencError(f"Only a table that 'learned' made has new rows, and this model {found}.")
    return masks


def _had_table(record: Record | None, where: Places) -> bool:
    """Whether the model had the table of its family before it was patched."""
    flag = where.family.table_flag
    return record is None or flag is None or bool(record.original.get(flag, True))


def _source(record: Record | None) -> TableSource | None:
    """The source of a text model's table, which all groups of layers share."""
    table = None if record is None else next(iter(record.effects().values())).table
    return None if isinstance(table, OwnGrid) else table
