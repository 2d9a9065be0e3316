"""Finds the positions of queries and keys for each attention call, and prepares how keys are rotated and cached.

`before_attention` is the forward pre-hook of every patched self-attention layer. It makes a `Call`, which the layer
passes on to `attention.attend`.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import EncoderDecoderCache

from ..compat.caches import query_offset
from ..compat.models import attention_of
from ..compat.pytorch import changes_of
from ..core.biases import Bias
from ..core.effects import FollowingRotation, Rotation
from ..core.patterns import Banded, Pattern
from ..core.precision import Fp32Buffers
from ..core.temperatures import Temperature
from ..errors import PosencError
from ..families.places import argument_names
from .attention_call import Angles, Call, Reading, Turn
from .cache_layers import EMPTY, STATIC, prepare_layer
from .masks import refuse_gaps
from .rotation import HALVES, rotate

PREFIX = "hf_posenc_"
"""The names of our attention functions begin with this."""
SEAL = "hf_posenc: pip install hf-posenc, then hf_posenc.load(path)"
"""The attention that `config.json` of a sealed model names. Plain transformers refuses it and prints this text."""


CACHES = ("past_key_values", "past_key_value", "layer_past")
"""The argument names by which attention layers take their cache."""
ANGLES = "position_embeddings"
"""The argument name by which attention layers take cos and sin."""
MASKS = ("attention_mask", "mask")
"""The argument names by which attention layers take their mask."""
FEW = 16
"""Up to this many queries all scores may be written out, and rotated keys that a cache keeps are used."""


class PassMemo:
    """Remembers what the first layer of a pass has computed, for its other layers.

    It is no part of a model's state, so that all instances are equal.
    """

    def __init__(self) -> None:
        self.found: tuple[tuple[Any, int], Any] = ((lambda: None, 0), None)

    def __call__(self, key: Tensor, find: Callable[[], Any], first: bool) -> Any:
        """The result of `find`, or the remembered one. `key` is a tensor that all layers of this pass get, and no
        layer of another pass. The first layer always computes."""
        if torch.compiler.is_compiling():
            return find()
        (of, changes), found = self.found
        # The first layer always looks: nobody counts how often a tensor of inference mode was changed.
        now = -1 if key.is_inference() else changes_of(key)
        if first or of() is not key or changes != now:
            found = find()
            self.found = ((weakref.ref(key), now), found)
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PassMemo)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        return PassMemo, ()


class Positions(Fp32Buffers):
    """What the attention layers of a patched model share: how q and k are rotated. A submodule of the base model."""

    inv_freq: Tensor
    weights: Tensor

    def __init__(
        self,
        rotation: Rotation | None,
        device: torch.device,
        layout: str = HALVES,
        pattern: Pattern | None = None,
        forgets: bool = False,
    ):
        super().__init__()
        self.rotation, self.layout, self.pattern, self.forgets = rotation, layout, pattern, forgets
        self.rendering: str | None = None
        """The rendering of a bias that the user chose with `set_rendering`; None for the cheapest one."""
        self.recall, self.factors, self.turned = PassMemo(), PassMemo(), PassMemo()
        inv_freq = rotation.inv_freq if rotation else ()
        weights = rotation.weights if isinstance(rotation, FollowingRotation) else ()
        self.inv_freq = nn.Buffer(torch.tensor(inv_freq, device=device, dtype=torch.float32), persistent=False)
        self.weights = nn.Buffer(torch.tensor(weights, device=device, dtype=torch.float32), persistent=False)

    @property
    def rotates_before_caching(self) -> bool:
        """Whether keys are rotated before they are cached."""
        return self.rotation is not None and not self.rotation.follows_length

    @property
    def rotates_after_caching(self) -> bool:
        return self.rotation is not None and self.rotation.follows_length

    def angles(self, positions: Tensor, stage: Tensor | None = None) -> Angles:
        """cos and sin, (batch, tokens, pairs) in fp32. `stage`, (batch,), if frequencies follow the length."""
        assert self.rotation is not None
        angles = positions[..., None].float() * self.frequencies(stage)
        return angles.cos() * self.rotation.attention_scaling, angles.sin() * self.rotation.attention_scaling

    def frequencies(self, stage: Tensor | None = None) -> Tensor:
        """The frequencies, (pairs,), or with stages (batch, 1, pairs)."""
        if stage is None:
            return self.inv_freq
        assert isinstance(self.rotation, FollowingRotation)
        return self.inv_freq * torch.exp(-self.rotation.growth(stage)[:, None, None] * self.weights)

    def turn(self, at: Tensor, stage: Tensor | None = None) -> Turn:
        assert self.rotation is not None
        return Turn(at, self.frequencies(stage), self.rotation.attention_scaling, self.layout)

    def extra_repr(self) -> str:
        return f"rotation={type(self.rotation).__name__ if self.rotation else None}"


class Link:
    """Connects an attention layer to the `Positions` and the bias that it shares with other layers of the model.

    It is not a module, so that it is not saved.
    """

    def __init__(
        self,
        root: nn.Module | None,
        suffix: str = "",
        layer: Any = None,
        index: int = 0,
        table: str | None = None,
        layer_type: str | None = None,
    ):
        self.layer_type = layer_type
        """The layer type, on layers to which a plan gives their own angles; "" if the model has a single type. None
        on all other layers."""
        self.root = root
        """The base model; None on layers that are not patched."""
        self.suffix, self.table = suffix, table
        self.index = index
        """The layer's index among the layers that are patched in the same way."""
        names = () if layer is None else argument_names(layer)
        self.counts = root is not None and "position_ids" not in argument_names(root)
        """Whether the model takes no position ids and counts positions itself, including padding (BART's decoder)."""
        self.states = names[0] if names else "hidden_states"
        self.cache = next((n for n in CACHES if n in names), CACHES[0])
        self.mask = next((n for n in MASKS if n in names), MASKS[0])
        # Layers that share the keys of another layer have no slot of their own in the cache.
        self.shares_keys = bool(getattr(layer, "is_kv_shared_layer", False))
        self.slot = "kv_shared_layer_index" if self.shares_keys else "layer_idx"
        """The attribute that holds the layer's index in the cache. Pruning a model numbers its layers anew."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Link:
        """The copy of a single layer shares with the model what all its layers share."""
        twin = copy.copy(self)
        twin.root = memo.get(id(self.root), self.root)
        return twin

    @property
    def first(self) -> bool:
        """Whether the layer is the first of its group to run in a pass."""
        return self.index == 0

    @property
    def shared(self) -> Positions:
        found: Positions = getattr(self.root, "posenc" + self.suffix)
        return found

    def table_positions(self, states: Tensor) -> Tensor | None:
        """The positions with which the model's table was called in this pass, if their shape fits; otherwise None.

        Also None if the model counts by itself and a rotation or bias has replaced its table.
        """
        if self.table is None or self.root is None:
            return None
        if self.counts and (self.shared.rotation is not None or self.bias is not None):
            return None
        table: Any = self.root.get_submodule(self.table)
        positions: Tensor | None = getattr(getattr(table, "notes", None), "positions", None)
        if positions is None or positions.ndim != 2:
            return None
        return positions if positions.shape in ((1, states.shape[1]), states.shape[:2]) else None

    @property
    def bias(self) -> Bias | None:
        return getattr(self.root, "posenc_bias" + self.suffix, None)

    @property
    def rotary(self) -> Any:
        """The rotary module of a part of a plan, used instead of the model's angles; None if there is none."""
        return getattr(self.root, "posenc_rotary" + self.suffix, None)

    @property
    def temperature(self) -> Temperature | None:
        return getattr(self.root, "posenc_temperature" + self.suffix, None)


def named_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a forward as keyword arguments."""
    return {**dict(zip(argument_names(module), args, strict=False)), **kwargs} if args else kwargs


def positions_in(given: dict[str, Any]) -> Tensor | None:
    """The positions in the arguments of a call: position ids, or those that its angles carry, or None."""
    positions = given.get("position_ids")
    if positions is None:
        angles = given.get(ANGLES)
        first = angles if angles is None or isinstance(angles, Tensor) else angles[0]
        positions = getattr(first, "posenc_positions", None)
    if positions is not None and positions.ndim != 2:
        raise PosencError(
            f"This model gives each token several positions (shape {tuple(positions.shape)}), as for images; a scheme "
            "inside attention supports one. Use a scheme that rescales RoPE, such as 'ntk', 'yarn' or 'linear'."
        )
    return positions


def before_attention(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of every patched self-attention layer: adds a `Call` to its arguments."""
    name, link = attention_of(module.config), module.posenc_link
    if not name.startswith(PREFIX):
        raise PosencError(
            f"This model is patched, and its attention was then set to {name!r}, which would drop its positions. "
            f"Set it to {PREFIX + 'sdpa'!r} or {PREFIX + 'eager'!r}, or call unpatch_model first."
        )
    kwargs = named_arguments(module, args, kwargs)
    states, shared = kwargs[link.states], link.shared
    if link.layer_type is not None:
        kwargs = {**kwargs, ANGLES: _planned_angles(kwargs, states, link)}
    past = kwargs.get(link.cache)
    cache: Any = past.self_attention_cache if isinstance(past, EncoderDecoderCache) else past
    if cache is None:
        positions = _query_positions(module, kwargs, link, 0)
        call = Call(positions, positions, 0)
        _note_gates(call, link, states)
        if shared.rotates_before_caching:
            angles = shared.recall(positions, partial(shared.angles, positions), link.first)
            call.angles = (angles, angles)
        return (), {**kwargs, "posenc_call": call}
    # A temperature alone does not need keys.
    if shared.rotation is None and shared.pattern is None and link.bias is None:
        told = positions_in(kwargs)
        start = 0 if told is not None else cache.get_query_offset(_slot(module, kwargs, link))
        positions = _query_positions(module, kwargs, link, start)
        return (), {**kwargs, "posenc_call": Call(positions, positions, None)}
    slot = _slot(module, kwargs, link)
    if link.shares_keys:
        call = cache.layers[slot].call
    else:
        start, (_, first) = query_offset(cache, slot), cache.get_mask_sizes(states.shape[1], slot)
        positions = _query_positions(module, kwargs, link, start)
        call = Call(positions, positions, None if isinstance(start, Tensor) else start - first)
        layer = prepare_layer(cache, slot, shared.forgets)
        _note_gates(call, link, states)
        _prepare(call, link, layer, len(states), kwargs.get(link.mask))
        layer.call = call
    return (), {**kwargs, "posenc_call": call}


def _planned_angles(kwargs: dict[str, Any], states: Tensor, link: Link) -> Any:
    """The angles for a layer of a plan, instead of those that the model computed for all layers of its type."""
    positions = positions_in(kwargs)
    if positions is None:
        raise PosencError(
            "The layers of this model get neither position_ids nor angles, and a plan that rotates some of them "
            "differently needs one of these. Use one scheme for all layers."
        )
    kind = (link.layer_type,) if link.layer_type else ()
    return link.shared.turned(positions, lambda: link.rotary(states, positions, *kind), link.first)


def _slot(module: Any, kwargs: dict[str, Any], link: Link) -> int:
    """A layer's index in the cache. Some models run a layer several times in a pass, with an index for each time."""
    return int(kwargs.get("layer_idx", getattr(module, link.slot, None)) + kwargs.get("cycle_offset", 0))


def _note_gates(call: Call, link: Link, states: Tensor) -> None:
    """Store the gates that a scheme computes from the hidden states of the new tokens."""
    bias = link.bias
    if bias is not None and bias.of_content:
        call.gates = bias(states, link.index)


def _query_positions(module: Any, kwargs: dict[str, Any], link: Link, start: Any) -> Tensor:
    """The positions of the queries: from the layer's arguments, from the model's table, or counted."""
    states, positions = kwargs[link.states], positions_in(kwargs)
    if positions is not None:
        return positions
    length, device, mask = states.shape[1], states.device, kwargs.get(link.mask)
    absolute = link.shared.rotates_after_caching or link.shared.pattern is not None or link.temperature is not None
    absolute |= not getattr(link.bias, "of_distance", True)
    causal = getattr(module, "is_causal", True)
    if absolute and causal and (seen := link.table_positions(states)) is not None:
        return seen
    counted = (torch.arange(length, device=device) + start)[None]
    if absolute and causal and mask is not None:  # only the mask shows left padding
        return (counted - _padding_in_front(mask)).clamp(min=0)
    return counted


def _padding_in_front(mask: Tensor) -> Tensor:
    """The number of keys before the first that any query sees, (batch, 1)."""
    hidden = ~(mask if mask.dtype == torch.bool else mask == 0)[:, 0].any(1)
    return hidden.long().cumprod(-1).sum(-1, keepdim=True)


def _prepare(call: Call, link: Link, layer: Any, rows: int, mask: Tensor | None) -> None:
    """Set what a cache layer must do with the new keys of a call."""
    shared, positions, fixed = link.shared, call.query, isinstance(layer, STATIC)
    if shared.rotates_before_caching:
        angles = shared.recall(positions, partial(shared.angles, positions), link.first)
        call.angles, call.rotate_keys = (angles, angles), partial(rotate, angles=angles)
    elif shared.forgets:
        _prepare_to_forget(call, link, layer, rows, mask)
    elif shared.rotates_after_caching or link.bias is not None or shared.pattern is not None:
        call.tracked = positions
        if isinstance(shared.rotation, FollowingRotation):
            _prepare_stage(call, shared, rows, link.first)
        elif (
            shared.pattern is not None
            and shared.rotates_after_caching
            and (fixed or not torch.compiler.is_compiling())
        ):
            call.reading = _zone_reading(shared) if positions.shape[1] <= FEW else None


def _prepare_stage(call: Call, shared: Positions, rows: int, first: bool) -> None:
    """If all queries of a row are in one stage, let the cache keep keys rotated for it until the stage ends."""
    rotation, positions = shared.rotation, call.query
    assert isinstance(rotation, FollowingRotation)
    length = positions.shape[1]
    if length > 1 and (length > FEW or torch.compiler.is_compiling()):
        return
    stages = rotation.stage(positions + 1)
    if length > 1 and bool((stages != stages[:, :1]).any()):
        return
    stage = stages[:, 0]
    angles = shared.recall(positions, lambda: shared.angles(positions, stage), first)
    call.stage, call.angles = stage, (angles, angles)

    def derive(keys: Tensor, at: Tensor) -> Tensor:
        return rotate(keys, angles if at.shape[1] == length else shared.angles(at, stage), shared.layout)

    turn = partial(shared.turn, stage=stage)
    call.reading = Reading((rotation, shared.layout), derive, turn, stage.expand(rows))


def _zone_reading(shared: Positions) -> Reading | None:
    """How a cache keeps keys rotated for far zones, in which all keys are sooner or later."""
    pattern = shared.pattern
    assert pattern is not None
    if pattern.cached_positions(shared.inv_freq.new_zeros(1, 1)) is None:
        return None

    def derive(keys: Tensor, at: Tensor) -> Tensor:
        return rotate(keys, shared.angles(pattern.cached_positions(at)), shared.layout)  # type: ignore[arg-type]

    def turn(at: Tensor) -> Turn:
        return shared.turn(pattern.cached_positions(at))  # type: ignore[arg-type]

    return Reading((shared.rotation, pattern, shared.layout), derive, turn)


def _prepare_to_forget(call: Call, link: Link, layer: Any, rows: int, mask: Tensor | None) -> None:
    """Prepare a cache that keeps only the first and recent tokens, and which must know which slots are padding."""
    pattern = link.shared.pattern
    assert isinstance(pattern, Banded) and pattern.far is not None and pattern.far.first is not None
    here = call.query.expand(rows, -1)
    if mask is not None:  # the last token sees everything but padding
        if layer.given and link.first:
            refuse_gaps(mask, here.shape[1], *layer.held_slots())
        real = mask[:, 0, -1, -here.shape[1] :]
        here = torch.where(real if real.dtype == torch.bool else real == 0, here, EMPTY)
    call.tracked, call.sizes = here, (pattern.far.first, pattern.window - 1)
    call.first_query = None if layer.given else 0
