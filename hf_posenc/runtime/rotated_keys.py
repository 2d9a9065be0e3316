"""Rotated keys beside a static cache in a compiled graph. `cache_layers.py` calls these functions.

Only the device knows how many keys there are and whether the rotated ones are still valid. A custom operation, which
the compiler does not trace, reads this and rotates what is needed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .attention_call import Reading
from .rotation import rotate


def reserve_keys(read: Any, stages: Any, reading: Reading, keys: Tensor) -> None:
    """Allocate the companion layers for rotated keys and their stages. They are empty at first."""
    read.lazy_initialization(keys, keys[..., :0])
    if reading.stage is not None:
        stages.lazy_initialization(_column(reading.stage, 1), keys[..., :0])


def update_keys(read: Any, stages: Any, reading: Reading, keys: Tensor, places: Tensor, slots: Tensor) -> Tensor:
    """All keys, rotated. Those in `slots` are new; the others are rotated again only if they are no longer valid."""
    stage, start = reading.stage, slots[0]
    holds = read.cumulative_length == start
    if stage is not None:
        yet_to_come = torch.arange(keys.shape[2], device=keys.device) >= start
        holds = holds & ((stages.keys[:, 0, :, 0] == stage[:, None]) | yet_to_come).all()
    keep_rotated(read.keys, keys, slots, holds, *reading.turn(places))
    for layer in (read, stages) if stage is not None else (read,):
        layer.cumulative_length.copy_(start + len(slots))
    if stage is not None:
        stages.keys.copy_(_column(stage, keys.shape[2]))
    kept: Tensor = read.keys
    return kept


def _column(stage: Tensor, length: int) -> Tensor:
    return stage[:, None, None, None].expand(-1, -1, length, -1)


@torch.library.custom_op("hf_posenc::keep_rotated", mutates_args=("kept",))
def keep_rotated(
    kept: Tensor,
    keys: Tensor,
    slots: Tensor,
    holds: Tensor,
    at: Tensor,
    inv_freq: Tensor,
    scaling: float,
    layout: str,
) -> None:
    """Write rotated keys into `kept`: those in `slots` if `holds` (the others are still valid), else all of them.

    This is not a `torch.cond`, because torch 2.13 loses assignments to attributes after one when it traces a graph.
    """
    whole = not holds
    if not whole:
        keys, at = keys.index_select(2, slots), at.index_select(1, slots)
    angles = at[..., None].float() * inv_freq
    turned = rotate(keys, (angles.cos() * scaling, angles.sin() * scaling), layout)
    if whole:
        kept.copy_(turned)
    else:
        kept.index_copy_(2, slots, turned)
