"""Keys as they are read, in a compiled graph with a static cache: only the device knows how many keys there are, and
whether those hold that were derived before. What asks it is an operation of its own, which no compiler looks into."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .attention_call import Reading
from .rotation import rotate


def reserve_keys(read: Any, stages: Any, reading: Reading, keys: Tensor) -> None:
    """Make room in the layers that keep derived keys and their stages. They hold nothing yet."""
    read.lazy_initialization(keys, keys[..., :0])
    if reading.stage is not None:
        stages.lazy_initialization(_column(reading.stage, 1), keys[..., :0])


def update_keys(read: Any, stages: Any, reading: Reading, keys: Tensor, places: Tensor, slots: Tensor) -> Tensor:
    """All keys as they are read. Those in `slots` are new; the others are derived as well if they have to be."""
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
    """Write rotated keys into `kept`: those in `slots`, or all where `holds` is not true of the others.

    No `torch.cond`: what is assigned to attributes after one is lost when torch 2.13 traces it.
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
