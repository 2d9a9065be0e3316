"""Cache layers that hold further data for each key, beside keys and values.

A cache of transformers keeps no positions. What a scheme needs for each cached key (its position, a gate, the rotated
key) is stored in companions: further cache layers inside the cache's own layers. Every operation on the cache
(reorder, select, repeat, crop, reset, offload, copy) is applied to companions too, so that they stay in step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from ..compat.caches import UNREGISTERED, clear_layer, layer_at
from ..compat.pytorch import assert_later
from ..errors import PosencError
from . import rotated_keys
from .attention_call import Call, Reading

OPERATIONS = (
    *("offload", "prefetch", "reset", "reorder_cache", "crop", "batch_repeat_interleave", "batch_select_indices"),
    "activate_past_recording",
)
"""The operations on cache layers that companions must follow."""
ROOM = 256
"""The largest number of tokens for which a growing layer reserves memory in advance."""
POSITIONS, READ, STAGE, GATES = "positions", "read", "stage", "gates"
"""The names of companions: positions of keys, keys rotated for reading, the stage of these, gates of forgetting."""
EMPTY = -1
"""The position of a slot that holds padding, and is never seen."""
LOST = "Fill a new one."


class Room:
    """Reserved memory, of which a layer's tensor is a view of the first tokens."""

    def __init__(self, memory: Tensor, used: int):
        self.memory = memory
        self.used = used
        """How many slots were written so far. These are not written again, because other tensors may share them."""


class GrowingLayer(DynamicLayer):
    """A dynamic layer that writes new tokens into reserved memory instead of copying all tokens at each step."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.rooms: dict[str, Room] = {}

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self._append("keys", key_states), self._append("values", value_states)
        self.keys, self.values = keys, values
        return keys, values

    def _append(self, name: str, new: Tensor) -> Tensor:
        held: Tensor = getattr(self, name)
        if torch.compiler.is_compiling() or torch.is_grad_enabled():  # autograd needs tensors that are not changed
            return torch.cat([held, new], -2) if held.ndim == new.ndim else new
        room, count = self.rooms.get(name), held.shape[-2] if held.ndim == new.ndim else 0
        end = count + new.shape[-2]
        if room is None or not _has_room(held, new, room):
            size = end + min(max(end // 16, 16), ROOM)
            room = Room(new.new_empty((*new.shape[:-2], size, new.shape[-1])), count)
            if count:
                room.memory[..., :count, :] = held
            self.rooms[name] = room
        room.memory[..., count:end, :] = new
        room.used = end
        return room.memory[..., :end, :]

    def reset(self) -> None:
        super().reset()
        clear_layer(self)
        self.rooms = {}

    def offload(self) -> None:
        super().offload()
        self.rooms = {}


def _has_room(held: Tensor, new: Tensor, room: Room) -> bool:
    """Whether new tokens can be written behind the held ones, in the same reserved memory."""
    memory = room.memory
    if memory.is_inference() and not torch.is_inference_mode_enabled():
        return False
    same = held.ndim == memory.ndim and held.data_ptr() == memory.data_ptr() and held.stride() == memory.stride()
    alike = (new.shape[:-2], new.shape[-1], new.dtype) == (memory.shape[:-2], memory.shape[-1], memory.dtype)
    rows = held.shape[:-2] == memory.shape[:-2]
    return same and alike and rows and room.used == held.shape[-2] <= memory.shape[-2] - new.shape[-2]


class SinkLayer(DynamicLayer):
    """A layer that keeps the first tokens of a text and the most recent ones, and counts all that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.given = 0
        self.keep: Tensor | None = None
        """For each row, the slots to keep after the next update; None keeps all."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states)
        self.given += key_states.shape[-2]
        if self.keep is not None:
            self.keys, self.values = select_slots(keys, self.keep), select_slots(values, self.keep)
        return keys, values

    @property
    def tokens_kept(self) -> int:
        """The number of tokens that it holds of each row."""
        return self.keys.shape[-2] if self.keys is not None and self.keys.ndim > 1 else 0

    def get_seq_length(self) -> int:
        return self.given

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.tokens_kept + query_length, self.given - self.tokens_kept

    def reset(self) -> None:
        super().reset()
        self.given, self.keep = 0, None
        clear_layer(self)

    def crop(self, tokens_to_remove: int) -> None:
        if self.given > self.tokens_kept:
            raise PosencError("A streaming cache has dropped tokens and cannot be cropped. " + LOST)
        super().crop(tokens_to_remove)
        self.given = self.tokens_kept


def select_slots(x: Tensor, slots: Tensor) -> Tensor:
    """The keys or values in the slots of each row: (batch, heads, keys, channels), (batch, slots)."""
    if len(x) == len(slots) == 1:  # faster: copies whole vectors, where gather looks up each number
        return x.index_select(2, slots[0])
    return x.gather(2, slots[:, None, :, None].expand(len(x), x.shape[1], -1, x.shape[3]))


def slots_to_keep(positions: Tensor, first: int, recent: int) -> Tensor | None:
    """For each row, the slots that a cache of fixed size keeps: the first tokens after the padding, and the last."""
    length = positions.shape[1]
    if length <= first + recent:
        return None
    slots = torch.arange(length, device=positions.device).expand_as(positions)
    empty = positions == EMPTY
    order = torch.where(empty, slots - length, slots).sort(-1).indices  # padding first, then the text in order
    padding = empty.sum(-1, keepdim=True)
    start = torch.where(length - padding > first + recent, padding, length - first - recent)
    sinks = order.gather(1, start + torch.arange(first, device=positions.device))
    return torch.cat([sinks, order[:, length - recent :]], -1)


class CarryingLayer(CacheLayerMixin):
    """Mixed into a cache layer when a patched model writes to it (`carrying_class`): adds companions."""

    companions: dict[str, Any]
    """Cache layers by name, each of which holds data for every key as if it were keys."""
    call: Call | None = None
    """Set before an update, which completes it. It stays, for layers that share these keys."""
    derived_by: Any = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        call, start = self.call, self.get_seq_length()
        if call is None or call.stored is not None:  # not written by a patched layer: nothing to track
            return super().update(key_states, value_states, *args, **kwargs)  # type: ignore[safe-super]
        if call.rotate_keys is not None:
            key_states = call.rotate_keys(key_states)
        if call.sizes is not None:
            self._choose_slots(call)
        if call.tracked is not None:
            places = self._track_positions(call.tracked.expand(len(key_states), -1), start)
            # Into an empty cache of fixed size all keys are new, and the mask, which is heeded, says which are seen.
            call.keys = places if call.sizes is None or start else call.query
        if call.gates is not None:
            call.gates = self._track_gates(call.gates[..., None], start)
        keys, values = super().update(key_states, value_states, *args, **kwargs)  # type: ignore[safe-super]
        call.read = self._read_keys(call, key_states.shape[2], keys)
        call.stored, call.rotate_keys, call.reading = keys, None, None
        return keys, values

    def _track_positions(self, positions: Tensor, start: Any) -> Tensor:
        """Store the positions of new keys, and return those of all keys that the update returns."""
        places = self.companions.get(POSITIONS)
        if places is None:
            places = self.companions[POSITIONS] = companion(self)
            _assume_no_gap(places, positions, start)
        held = places.keys
        if held is not None and held.ndim > 1 and len(held) != len(positions):
            raise PosencError(
                f"The cache holds the positions of {len(held)} rows, and {len(positions)} rows are read now: it was "
                f"changed in a way that loses them. {LOST}"
            )
        known = places.get_seq_length()
        if torch.compiler.is_compiling() and isinstance(start, Tensor):
            told = f"The cache knows the positions of more or fewer tokens than it holds. {LOST}"
            assert_later(known == start, told)
        elif known != start:
            raise PosencError(
                f"The cache holds {int(start)} tokens and knows the positions of {int(known)}: another model has "
                f"written to it, or it was changed in a way that loses them. {LOST}"
            )
        new = positions.long()[:, None, :, None]
        beside = new[..., :0]
        if isinstance(places, SinkLayer):  # where in the text they are, for `held_slots`
            beside = (torch.arange(new.shape[2], device=new.device) + start)[:, None].expand_as(new)
        return places.update(new, beside)[0][:, 0, :, 0]

    def held_slots(self) -> tuple[Tensor, Tensor]:
        """Which of the tokens that a cache of fixed size holds are no padding, and how far each is from the next one:
        (batch, keys)."""
        places: Any = self.companions[POSITIONS]
        return places.keys[:, 0, :, 0] != EMPTY, self.get_seq_length() - places.values[:, 0, :, 0]

    def _track_gates(self, new: Tensor, start: Any) -> Tensor:
        """Store the gates of new tokens, and return those of all keys that the update returns."""
        kept = self.companions.get(GATES)
        held = kept.get_seq_length() if kept is not None else 0
        compiled = torch.compiler.is_compiling() and isinstance(start, Tensor)  # known to the device only
        if not compiled and int(held) != int(start):
            raise PosencError(
                f"The cache holds {int(start)} tokens and knows of {int(held)} what they say of the past: another "
                f"model has written to it, or it was changed in a way that loses that. {LOST}"
            )
        if kept is None:
            kept = self.companions[GATES] = companion(self)
        gates: Tensor = kept.update(new, new[..., :0])[0][..., 0]
        return gates

    def _read_keys(self, call: Call, new: int, keys: Tensor) -> Tensor | None:
        """All keys, rotated as attention reads them; None if the cache does not keep them so. Keys that were rotated
        in earlier calls are used again while they are still valid."""
        reading, fixed = call.reading, isinstance(self, STATIC)
        kept = isinstance(self, GrowingLayer) or (fixed and not torch.is_grad_enabled())
        graph = fixed and torch.compiler.is_compiling()
        # The operation for graphs reads a value of the device; an exported graph runs without this package.
        waits = keys.device.type != "cpu" or torch.compiler.is_exporting()
        if reading is None or not kept or (graph and waits):
            self.companions.pop(READ, None)
            self.companions.pop(STAGE, None)
            return None
        if graph:
            return self._read_keys_in_graph(reading, new, keys, call.keys)
        end = int(self.get_seq_length()) if fixed else keys.shape[2]
        start = end - new
        if not self._still_valid(reading, start):
            self.companions[READ], self.companions[STAGE] = companion(self), companion(self)
            self.derived_by, start = reading.by, 0
        added = reading.derive(keys[:, :, start:end], call.keys[:, start:end])
        if reading.stage is not None:
            stage = reading.stage.expand(len(keys))[:, None, None, None].expand(-1, -1, end - start, -1)
            self.companions[STAGE].update(stage, stage[..., :0])
        read: Tensor = self.companions[READ].update(added, added[..., :0])[0]
        return read

    def _read_keys_in_graph(self, reading: Reading, new: int, keys: Tensor, places: Tensor) -> Tensor:
        if READ not in self.companions or self.derived_by != reading.by:
            self.companions[READ], self.companions[STAGE] = companion(self), companion(self)
            self.derived_by = reading.by
            rotated_keys.reserve_keys(self.companions[READ], self.companions[STAGE], reading, keys)
        slots = torch.arange(-new, 0, device=keys.device) + self.get_seq_length()
        return rotated_keys.update_keys(self.companions[READ], self.companions[STAGE], reading, keys, places, slots)

    def _still_valid(self, reading: Reading, count: int) -> bool:
        """Whether exactly `count` keys are stored, rotated as `reading` would rotate them now."""
        kept = self.companions.get(READ)
        if kept is None or self.derived_by != reading.by or count == 0 or kept.get_seq_length() != count:
            return False
        behind = kept.keys if isinstance(kept, StaticLayer) else None
        if behind is not None and behind.is_inference() and not torch.is_inference_mode_enabled():
            return False  # inference tensors cannot be written outside inference mode
        if reading.stage is None:
            return True
        return bool((self.companions[STAGE].keys[:, 0, :count, 0] == reading.stage[:, None]).all())

    def _choose_slots(self, call: Call) -> None:
        """Choose the slots that a cache of fixed size keeps after this update."""
        assert call.tracked is not None and call.sizes is not None
        places: Any = self.companions.setdefault(POSITIONS, SinkLayer())
        every = call.tracked
        if places.tokens_kept:
            every = torch.cat([places.keys[:, 0, :, 0], every], -1)
        self.keep = places.keep = slots_to_keep(every, *call.sizes)

    def __reduce__(self) -> Any:
        state = {name: value for name, value in vars(self).items() if name not in ("call", "rooms")}
        return _rebuild, (type(self).__mro__[2],), state


def _rebuild(kind: type) -> Any:
    layer: Any = object.__new__(carrying_class(kind))
    if kind is GrowingLayer:
        layer.rooms = {}
    return layer


def companion(layer: Any) -> Any:
    """A new layer that keeps the same slots as the given one."""
    if isinstance(layer, StaticSlidingWindowLayer):
        return StaticSlidingWindowLayer(max_cache_len=layer.max_cache_len, sliding_window=layer.max_cache_len)
    if isinstance(layer, StaticLayer):
        return StaticLayer(max_cache_len=layer.max_cache_len)
    if isinstance(layer, DynamicSlidingWindowLayer):
        sliding = DynamicSlidingWindowLayer(sliding_window=layer.sliding_window)
        sliding.record_past = getattr(layer, "record_past", False)
        return sliding
    return SinkLayer() if isinstance(layer, SinkLayer) else GrowingLayer()


def _assume_no_gap(places: Any, positions: Tensor, start: Any) -> None:
    """Give positions to keys that were cached before the model was patched: they run up to this text without a gap."""
    if isinstance(start, Tensor):  # a static cache: only the device knows how much it holds
        end = places.max_cache_len
        run = (positions[:, :1].long() - start + torch.arange(end, device=positions.device))[:, None, :, None]
        places.lazy_initialization(run, run[..., :0])
        places.keys.copy_(run)
        places.cumulative_length.copy_(start)
    elif start:
        run = (positions[:, :1].long() - start + torch.arange(start, device=positions.device))[:, None, :, None]
        places.update(run, run[..., :0])


@cache
def carrying_class(kind: Any) -> Any:
    """The subclass of a kind of cache layer that also holds companions."""
    moved = {name: _with_companions(getattr(kind, name)) for name in OPERATIONS if hasattr(kind, name)}
    # With a layer type the class would replace the model's own one in transformers' table.
    return type(f"Carrying{kind.__name__}", (CarryingLayer, kind), {**moved, **UNREGISTERED})


def _with_companions(operation: Callable[..., Any]) -> Callable[..., Any]:
    def on_all(self: Any, *args: Any, **kwargs: Any) -> None:
        operation(self, *args, **kwargs)
        self.call = None
        for layer in self.companions.values():
            getattr(layer, operation.__name__)(*args, **kwargs)

    return on_all


DYNAMIC, STATIC, FORGETTING = carrying_class(GrowingLayer), carrying_class(StaticLayer), carrying_class(SinkLayer)
"""The usual classes, created in advance because a compiler cannot create classes."""


def prepare_layer(cache: Any, slot: int, forgets: bool = False) -> Any:
    """The layer of a cache at this index, replaced by one that carries companions if it is not one yet."""
    if not hasattr(cache, "layers"):
        raise PosencError(
            f"This scheme needs the positions of cached keys, and a {type(cache).__name__} has no layers that could "
            "keep them. Pass a Cache of transformers, or none."
        )
    layer = layer_at(cache, slot)
    if isinstance(layer, CarryingLayer) and isinstance(layer, SinkLayer) == forgets:
        return layer
    if forgets:
        _refuse_to_forget(cache, layer)
        settled = FORGETTING()
    elif isinstance(layer, SinkLayer) and layer.given:
        raise PosencError("This cache was filled by 'streaming', which drops tokens. " + LOST)
    elif type(layer) in (DynamicLayer, SinkLayer):
        settled = DYNAMIC()
    else:
        kind: Any = type(layer)
        settled = object.__new__(STATIC if kind is StaticLayer else carrying_class(kind))
    if not forgets:
        for name, value in vars(layer).items():
            setattr(settled, name, value)
    settled.companions = {}
    cache.layers[slot] = settled
    return settled


def _refuse_to_forget(cache: Any, layer: Any) -> None:
    if not isinstance(cache, DynamicCache):
        raise PosencError(
            f"'streaming' makes its own cache of fixed size out of a DynamicCache, and got a {type(cache).__name__}. "
            "Pass no cache, or an empty DynamicCache."
        )
    if type(layer) not in (DynamicLayer, DYNAMIC):
        raise PosencError(
            f"'streaming' drops keys from the cache, and this model's cache has a {type(layer).__name__}, which keeps "
            "more than keys and values. Use another scheme, such as 'self_extend'."
        )
    if layer.get_seq_length():
        raise PosencError(
            "'streaming' cannot go on from a cache that another scheme has filled; begin with an empty one."
        )
