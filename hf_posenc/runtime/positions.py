"""Where queries and keys stand in one attention call, and how they are rotated there."""

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
from .rotation import HALVES, rotate

PREFIX = "hf_posenc_"
"""Opens the names of our attention functions."""
SEAL = "hf_posenc: pip install hf-posenc, then hf_posenc.load(path)"
"""What `config.json` of a sealed model names as its attention: transformers refuses it, and prints it."""


CACHES = ("past_key_values", "past_key_value", "layer_past")
"""What attention layers call their cache."""
ANGLES = "position_embeddings"
"""What attention layers call cos and sin."""
MASKS = ("attention_mask", "mask")
"""What they call their mask."""
FEW = 16
"""Up to this many queries, their scores may be written out, and what a cache keeps for decoding is of use."""


class PassMemo:
    """What the first layer of a pass found out, for the others. No part of a model's state: any two are alike."""

    def __init__(self) -> None:
        self.found: tuple[tuple[Any, int], Any] = ((lambda: None, 0), None)

    def __call__(self, key: Tensor, find: Callable[[], Any], first: bool) -> Any:
        """`key`: a tensor that all layers of one pass are given, and those of no other pass."""
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
    """What the attention layers of a patched model share: how q and k are rotated. Lives on the base model."""

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
        """How a bias is added, where not the cheapest way (`set_rendering`)."""
        self.recall, self.factors, self.turned = PassMemo(), PassMemo(), PassMemo()
        inv_freq = rotation.inv_freq if rotation else ()
        weights = rotation.weights if isinstance(rotation, FollowingRotation) else ()
        self.inv_freq = nn.Buffer(torch.tensor(inv_freq, device=device, dtype=torch.float32), persistent=False)
        self.weights = nn.Buffer(torch.tensor(weights, device=device, dtype=torch.float32), persistent=False)

    @property
    def early(self) -> bool:
        """Whether keys are rotated before they are cached."""
        return self.rotation is not None and not self.rotation.follows_length

    @property
    def late(self) -> bool:
        return self.rotation is not None and self.rotation.follows_length

    def angles(self, positions: Tensor, stage: Tensor | None = None) -> Angles:
        """cos and sin, (batch, tokens, pairs) in fp32. `stage`: (batch,) where frequencies follow the length."""
        assert self.rotation is not None
        angles = positions[..., None].float() * self.frequencies(stage)
        return angles.cos() * self.rotation.attention_scaling, angles.sin() * self.rotation.attention_scaling

    def frequencies(self, stage: Tensor | None = None) -> Tensor:
        """(pairs,), or (batch, 1, pairs) of stages."""
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
    """How an attention layer finds what it shares with others on the model. Not a module, so not saved."""

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
        """Of layers that a plan gives angles of their own; "" where the model has one type."""
        self.root = root
        """None on layers that are left alone."""
        self.suffix, self.table = suffix, table
        self.index = index
        """The layer's place among those that are patched alike."""
        names = () if layer is None else argument_names(layer)
        self.counts = root is not None and "position_ids" not in argument_names(root)
        """Whether the model counts by itself, padding as well, and nobody can tell it otherwise (BART's decoder)."""
        self.states = names[0] if names else "hidden_states"
        self.cache = next((n for n in CACHES if n in names), CACHES[0])
        self.mask = next((n for n in MASKS if n in names), MASKS[0])
        # Layers that take over the keys of another one have none in the cache.
        self.borrows = bool(getattr(layer, "is_kv_shared_layer", False))
        self.slot = "kv_shared_layer_index" if self.borrows else "layer_idx"
        """The attribute that says which place in the cache is the layer's: who prunes layers numbers them anew."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Link:
        """A layer that is copied alone shares with its model what others share with it."""
        twin = copy.copy(self)
        twin.root = memo.get(id(self.root), self.root)
        return twin

    @property
    def first(self) -> bool:
        """Whether the layer is the first of its kind to run in a pass."""
        return self.index == 0

    @property
    def shared(self) -> Positions:
        found: Positions = getattr(self.root, "posenc" + self.suffix)
        return found

    def seen(self, states: Tensor) -> Tensor | None:
        """The positions that the model's table was asked for in this pass, if they fit. Of a table that was only
        counted for and whose place a scheme has taken, they say nothing."""
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
        """The rotary module of a part of a plan, in place of what the model would tell; None where there is none."""
        return getattr(self.root, "posenc_rotary" + self.suffix, None)

    @property
    def temperature(self) -> Temperature | None:
        return getattr(self.root, "posenc_temperature" + self.suffix, None)


def named_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a forward, by name."""
    return {**dict(zip(argument_names(module), args, strict=False)), **kwargs} if args else kwargs


def positions_in(given: dict[str, Any]) -> Tensor | None:
    """Where the tokens of a call stand, as its arguments say: outright, or by the angles made for them."""
    positions = given.get("position_ids")
    if positions is None:
        angles = given.get(ANGLES)
        first = angles if angles is None or isinstance(angles, Tensor) else angles[0]
        positions = getattr(first, "posenc_positions", None)
    if positions is not None and positions.ndim != 2:
        raise PosencError(
            f"This model gives each token several positions (shape {tuple(positions.shape)}), as for images; a scheme "
            "inside attention knows one. Schemes that rescale RoPE ('ntk', 'yarn', 'linear') work here."
        )
    return positions


def before_attention(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of every self-attention layer: finds out where queries and keys stand."""
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
        if shared.early:
            angles = shared.recall(positions, partial(shared.angles, positions), link.first)
            call.angles = (angles, angles)
        return (), {**kwargs, "posenc_call": call}
    if shared.rotation is None and shared.pattern is None and link.bias is None:  # a temperature: no key is asked
        told = positions_in(kwargs)
        start = 0 if told is not None else cache.get_query_offset(_slot(module, kwargs, link))
        positions = _query_positions(module, kwargs, link, start)
        return (), {**kwargs, "posenc_call": Call(positions, positions, None)}
    slot = _slot(module, kwargs, link)
    if link.borrows:
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
    """What a layer of a plan is told instead of the angles that the model made for all of its type."""
    positions = positions_in(kwargs)
    if positions is None:
        raise PosencError("The layers of this model are not told positions, and a plan rotates them differently.")
    kind = (link.layer_type,) if link.layer_type else ()
    return link.shared.turned(positions, lambda: link.rotary(states, positions, *kind), link.first)


def _slot(module: Any, kwargs: dict[str, Any], link: Link) -> int:
    """A layer's place in the cache: some models run a layer more than once in a pass, with a place for each time."""
    return int(kwargs.get("layer_idx", getattr(module, link.slot, None)) + kwargs.get("cycle_offset", 0))


def _note_gates(call: Call, link: Link, states: Tensor) -> None:
    """What a scheme takes from the hidden states of the new tokens."""
    bias = link.bias
    if bias is not None and bias.of_content:
        call.said = bias(states, link.index)


def _query_positions(module: Any, kwargs: dict[str, Any], link: Link, start: Any) -> Tensor:
    """Where the queries stand: as the layer is told, as the model's table was asked, or counted."""
    states, positions = kwargs[link.states], positions_in(kwargs)
    if positions is not None:
        return positions
    length, device, mask = states.shape[1], states.device, kwargs.get(link.mask)
    absolute = link.shared.late or link.shared.pattern is not None or link.temperature is not None
    absolute |= not getattr(link.bias, "of_distance", True)
    causal = getattr(module, "is_causal", True)
    if absolute and causal and (seen := link.seen(states)) is not None:
        return seen
    counted = (torch.arange(length, device=device) + start)[None]
    if absolute and causal and mask is not None:  # nobody is told of padding in front but by the mask
        return (counted - _padding_in_front(mask)).clamp(min=0)
    return counted


def _padding_in_front(mask: Tensor) -> Tensor:
    """How many keys no query sees before the first that one does, (batch, 1)."""
    hidden = ~(mask if mask.dtype == torch.bool else mask == 0)[:, 0].any(1)
    return hidden.long().cumprod(-1).sum(-1, keepdim=True)


def _prepare(call: Call, link: Link, layer: Any, rows: int, mask: Tensor | None) -> None:
    """What a layer of the cache has to do with the new keys of a call."""
    shared, positions, fixed = link.shared, call.query, isinstance(layer, STATIC)
    if shared.early:
        angles = shared.recall(positions, partial(shared.angles, positions), link.first)
        call.angles, call.rotate_keys = (angles, angles), partial(rotate, angles=angles)
    elif shared.forgets:
        _prepare_to_forget(call, shared, layer, rows, mask)
    elif shared.late or link.bias is not None or shared.pattern is not None:
        call.tracked = positions
        if isinstance(shared.rotation, FollowingRotation):
            _prepare_stage(call, shared, rows, link.first)
        elif shared.pattern is not None and shared.late and (fixed or not torch.compiler.is_compiling()):
            call.reading = _zone_reading(shared) if positions.shape[1] <= FEW else None


def _prepare_stage(call: Call, shared: Positions, rows: int, first: bool) -> None:
    """Where all queries of a row are in one stage, keys rotated for it serve until it ends."""
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
    """How a cache keeps keys for zones that all of them come to be in."""
    pattern = shared.pattern
    assert pattern is not None
    if pattern.kept(shared.inv_freq.new_zeros(1, 1)) is None:
        return None

    def derive(keys: Tensor, at: Tensor) -> Tensor:
        return rotate(keys, shared.angles(pattern.kept(at)), shared.layout)  # type: ignore[arg-type]

    def turn(at: Tensor) -> Turn:
        return shared.turn(pattern.kept(at))  # type: ignore[arg-type]

    return Reading((shared.rotation, pattern, shared.layout), derive, turn)


def _prepare_to_forget(call: Call, shared: Positions, layer: Any, rows: int, mask: Tensor | None) -> None:
    """A cache that keeps only the first and the recent tokens also keeps which of its slots are padding."""
    pattern = shared.pattern
    assert isinstance(pattern, Banded) and pattern.far is not None and pattern.far.first is not None
    here = call.query.expand(rows, -1)
    if mask is not None:  # padding is what the last token does not see
        real = mask[:, 0, -1, -here.shape[1] :]
        here = torch.where(real if real.dtype == torch.bool else real == 0, here, EMPTY)
    call.tracked, call.sizes = here, (pattern.far.first, pattern.window - 1)
    call.first_query = None if layer.given else 0
