"""A cache of fixed size: the first tokens of a text and the most recent ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from ..errors import PosencError

EMPTY = -1
"""The position of a slot that holds padding, and is never seen."""


class SinkLayer(DynamicLayer):
    """Keeps what `keep` says of the keys that it holds and of new ones; counts all that it was ever given."""

    def __init__(self) -> None:
        super().__init__()
        self.given = 0
        self.keep: Tensor | None = None
        """Per row, the slots to keep after the next update; None keeps all."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states)
        self.given += key_states.shape[-2]
        if self.keep is not None:
            index = self.keep[:, None, :, None]
            self.keys, self.values = (
                x.gather(2, index.expand(len(x), x.shape[1], -1, x.shape[3])) for x in (keys, values)
            )
        return keys, values

    def get_seq_length(self) -> int:
        return self.given

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        held = 0 if self.keys is None or not self.is_initialized else self.keys.shape[-2]
        return held + query_length, self.given - held

    def reset(self) -> None:
        super().reset()
        self.given, self.keep = 0, None
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        raise PosencError("A streaming cache has dropped tokens and cannot be cut back; fill a new one.")


def settle(cache: Any, slot: int) -> None:
    """See to it that this layer of a cache is one of fixed size."""
    if not isinstance(cache, DynamicCache):
        raise PosencError(
            f"'streaming' keeps a cache of fixed size by itself, in the place of a DynamicCache; a "
            f"{type(cache).__name__} was given. Pass none, or an empty DynamicCache."
        )
    while len(cache.layers) <= slot:
        cache.layers.append(SinkLayer())
    layer: Any = cache.layers[slot]
    if isinstance(layer, SinkLayer):
        return
    if type(layer) is not DynamicLayer:
        raise PosencError(
            f"'streaming' drops keys from a cache, and this model's holds a {type(layer).__name__}, which keeps more "
            "than keys and values."
        )
    if layer.get_seq_length():
        raise PosencError(
            "'streaming' cannot go on from a cache that another scheme has filled; begin with an empty one."
        )
    cache.layers[slot] = SinkLayer()


def kept_slots(positions: Tensor, first: int, recent: int) -> Tensor | None:
    """Per row, which slots a cache keeps: those of the first tokens that are no padding, and the last ones."""
    length = positions.shape[1]
    if length <= first + recent:
        return None
    slots = torch.arange(length, device=positions.device).expand_as(positions)
    empty = positions == EMPTY
    order = torch.where(empty, slots - length, slots).sort(-1).indices  # padding first, the text as it was
    padding = empty.sum(-1, keepdim=True)
    start = torch.where(length - padding > first + recent, padding, length - first - recent)
    sinks = order.gather(1, start + torch.arange(first, device=positions.device))
    return torch.cat([sinks, order[:, length - recent :]], -1)
