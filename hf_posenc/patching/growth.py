"""Which rows of a live table are new, so that training can be kept to them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import PosencError
from ..families import places
from ..schemes.learned import Learned, trained_rows
from .describe import bare, live_table, record_of


def new_rows(model: Any) -> dict[str, Tensor]:
    """By name of parameter, a mask over the rows that `learned` made anew, and did not take over from a table.

    Names are those of `model.named_parameters()`. To tune only these rows, multiply the gradient by the mask:
    `parameter.register_hook(lambda grad: grad * mask[:, None].to(grad))`; and let no weight decay shrink the others.
    """
    where = places(bare(model))
    record = record_of(where)
    if record is None or not isinstance(record.scheme, Learned):
        found = "is not patched" if record is None else f"is patched with {record.scheme.name!r}"
        raise PosencError(f"Only a table that 'learned' made has new rows, and this model {found}.")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    masks = {}
    for stack in where.stacks:
        table = live_table(stack)
        trained = trained_rows(record.scheme, record.geometry, stack.table is not None)
        kept = torch.ones(table.offset, dtype=torch.bool)  # rows before position 0 are the family's own
        masks[names[id(table.weight)]] = ~torch.cat([kept, trained]).to(table.weight.device)
    return masks
