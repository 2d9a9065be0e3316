"""Where queries and keys stand in one attention call, and how they are rotated there."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, EncoderDecoderCache

from ..core.biases import Bias
from ..core.effects import FollowingRotation, Rotation
from ..core.patterns import Banded, Pattern
from ..core.precision import Fp32Buffers
from ..errors import PosencError
from ..families.finding import argument_names
from .streaming_cache import EMPTY, kept_slots, settle

PREFIX = "hf_posenc_"
"""Opens the names of our attention functions."""
SEAL = "hf_posenc: pip install hf-posenc, then hf_posenc.load(path)"
"""What `config.json` of a sealed model names as its attention: transformers refuses it, and prints it."""


HALVES, NEIGHBOURS, LAST = "halves", "neighbours", "_last"
LAYOUTS = (HALVES, NEIGHBOURS, HALVES + LAST, NEIGHBOURS + LAST)
"""Which channels form a pair: i and i + d/2, or 2i and 2i + 1; and whether they are the first or last of a head."""
CACHES = ("past_key_values", "past_key_value", "layer_past")
"""What attention layers call their cache."""
Angles = tuple[Tensor, Tensor]
"""cos and sin, (batch, tokens, pairs)."""


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
        inv_freq = self.inv_freq
        if stage is not None:
            assert isinstance(self.rotation, FollowingRotation)
            inv_freq = inv_freq * torch.exp(-self.rotation.growth(stage)[:, None, None] * self.weights)
        angles = positions[..., None].float() * inv_freq
        return angles.cos() * self.rotation.attention_scaling, angles.sin() * self.rotation.attention_scaling

    def extra_repr(self) -> str:
        return f"rotation={type(self.rotation).__name__ if self.rotation else None}"


def rotate(x: Tensor, angles: Angles, layout: str = HALVES) -> Tensor:
    """Rotate pairs of channels of each head; channels past the rotated ones are left alone."""
    cos, sin = (a[:, None].to(x.dtype) for a in angles)
    if layout != HALVES:
        return _rotate_elsewhere(x, cos, sin, layout)
    pairs = cos.shape[-1]
    first, second, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)
    # Decoding rotates all keys of a cache: written in place, this is most of what it costs.
    rotated = torch.empty_like(x)
    torch.mul(first, cos, out=rotated[..., :pairs]).sub_(second * sin)
    torch.mul(second, cos, out=rotated[..., pairs : 2 * pairs]).add_(first * sin)
    if rest.shape[-1]:
        rotated[..., 2 * pairs :] = rest
    return rotated


def _rotate_elsewhere(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """As `rotate`, where pairs are neighbours, or the rotated channels are the last ones of a head."""
    size = 2 * cos.shape[-1]
    start = x.shape[-1] - size if layout.endswith(LAST) else 0
    part = x[..., start : start + size]
    halves = layout.startswith(HALVES)
    first, second = part.chunk(2, -1) if halves else (part[..., 0::2], part[..., 1::2])
    rotated = (first * cos - second * sin, second * cos + first * sin)
    joined = torch.cat(rotated, -1) if halves else torch.stack(rotated, -1).flatten(-2)
    return torch.cat((x[..., :start], joined, x[..., start + size :]), -1)


class Link:
    """How an attention layer finds what it shares with others on the model. Not a module, so not saved."""

    def __init__(
        self,
        root: nn.Module | None,
        suffix: str = "",
        layer: Any = None,
        first: bool = False,
        table: str | None = None,
    ):
        self.root = root
        """None on layers that are left alone."""
        self.suffix, self.table = suffix, table
        self.first = first
        """Whether the layer is the first of its kind to run in a pass."""
        names = argument_names(layer) if layer is not None else ()
        self.states = names[0] if names else "hidden_states"
        self.cache = next((n for n in CACHES if n in names), CACHES[0])
        # Layers that take over the keys of another one have none in the cache.
        shared = getattr(layer, "is_kv_shared_layer", False)
        self.slot = getattr(layer, "kv_shared_layer_index" if shared else "layer_idx", None)

    @property
    def shared(self) -> Positions:
        found: Positions = getattr(self.root, "posenc" + self.suffix)
        return found

    def seen(self, states: Tensor) -> Tensor | None:
        """The positions that the model's table was asked for in this pass, if they fit."""
        if self.table is None or self.root is None or torch.compiler.is_compiling():
            return None
        table: Any = self.root.get_submodule(self.table)
        positions: Tensor | None = getattr(getattr(table, "notes", None), "positions", None)
        if positions is None or positions.ndim != 2:
            return None
        return positions if positions.shape in ((1, states.shape[1]), states.shape[:2]) else None

    @property
    def bias(self) -> Bias | None:
        return getattr(self.root, "posenc_bias" + self.suffix, None)


class Call(NamedTuple):
    """What one attention call knows of positions."""

    query: Tensor
    """Positions of the queries, (batch or 1, queries)."""
    keys: Tensor
    """Positions of the keys, (batch or 1, keys); slots of a static cache that are still empty hold anything."""
    first_query: int | None
    """Which of the keys stands with the first query; None under a static cache, where only the device knows."""
    keys_rotated: bool
    """Whether the keys were rotated before they were cached."""
    angles: tuple[Angles, Angles] | None = None
    """Of the queries and of the keys; None where keys are rotated once for each stage that queries are in."""

    def key(self, length: int) -> Tensor:
        return self.keys[:, :length]

    def without_gaps(self, masked: bool) -> bool:
        """Whether slots tell all distances: positions rise by one, but for padding in front, which a mask hides."""
        if torch.compiler.is_compiling() or self.first_query is None:
            return False
        steps = self.keys.diff(dim=-1)
        if not masked:
            return bool((steps == 1).all())
        rising = (steps.diff(dim=-1) >= 0).all()
        return bool(((steps == 0) | (steps == 1)).all() & rising)


class RotatingCache:
    """Stands in for a cache during one attention call, and rotates keys before they are stored."""

    def __init__(self, cache: Cache, angles: Angles):
        self.cache, self.angles = cache, angles

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.cache.update(rotate(keys, self.angles), values, *args, **kwargs)


def rotating(past: Any, angles: Angles) -> Any:
    """A stand-in for `past` that rotates the keys which self-attention stores."""
    if not isinstance(past, EncoderDecoderCache):
        return RotatingCache(past, angles)
    stand_in = copy.copy(past)
    stand_in.self_attention_cache = RotatingCache(past.self_attention_cache, angles)  # type: ignore[assignment]
    return stand_in


def named_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a forward, by name."""
    return {**dict(zip(argument_names(module), args, strict=False)), **kwargs} if args else kwargs


def positions_in(given: dict[str, Any]) -> Tensor | None:
    """Where the tokens of a call stand, as its arguments say: outright, or by the angles made for them."""
    positions = given.get("position_ids")
    if positions is None:
        angles = given.get("position_embeddings")
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
    name, link = module.config._attn_implementation, module.posenc_link
    if not name.startswith(PREFIX):
        raise PosencError(
            f"This model is patched, and its attention was then set to {name!r}, which would drop its positions. "
            f"Set it to {PREFIX + 'sdpa'!r} or {PREFIX + 'eager'!r}, or call unpatch_model first."
        )
    kwargs = named_arguments(module, args, kwargs)
    states = kwargs[link.states]
    past = kwargs.get(link.cache)
    cache: Any = past.self_attention_cache if isinstance(past, EncoderDecoderCache) else past
    # Some models run a layer more than once in a pass, with a place in the cache for each time.
    slot = kwargs.get("layer_idx", link.slot) + kwargs.get("cycle_offset", 0) if cache is not None else 0
    start = 0 if cache is None else cache.get_query_offset(slot)
    shared, positions = link.shared, positions_in(kwargs)
    if positions is None and shared.late and getattr(module, "is_causal", True):
        positions = link.seen(states)
    if positions is None:
        positions = (torch.arange(states.shape[1], device=states.device) + start)[None]
    call = Call(positions, positions, 0, False)
    if cache is None:
        if shared.early:
            angles = shared.angles(positions)
            call = call._replace(angles=(angles, angles))
    elif shared.early:
        if link.first:
            note_angles(cache, link, (shared.angles(positions),) * 2)
        angles, _ = cache.posenc_angles[link.suffix]
        call = call._replace(keys_rotated=True, angles=(angles, angles))
        kwargs = {**kwargs, link.cache: rotating(past, angles)}
    elif shared.forgets:
        call = forgetting_call(cache, slot, positions, states, kwargs.get("attention_mask"), link)
    elif shared.late or link.bias is not None or shared.pattern is not None:
        sizes = cache.get_mask_sizes(states.shape[1], slot)
        call = cached_call(cache, positions, start, sizes, states.shape[0], link)
    return (), {**kwargs, "posenc_call": call}


def note_angles(cache: Any, link: Link, angles: tuple[Angles, Angles]) -> None:
    """Keep what the layers of a group share in this pass. Groups take turns, so each has a place of its own."""
    cache.posenc_angles = {**getattr(cache, "posenc_angles", {}), link.suffix: angles}


def cached_call(cache: Any, positions: Tensor, start: Any, sizes: tuple[int, int], batch: int, link: Any) -> Call:
    """What a call over a cache knows. The first layer of a pass finds it out for all."""
    shared, (count, first) = link.shared, sizes
    decoding = isinstance(shared.rotation, FollowingRotation) and positions.shape[1] == 1
    if link.first:
        slots = [getattr(layer, "max_cache_len", 0) for layer in cache.layers]  # static ones may differ in size
        remember(cache, positions, start, max([first + count, *slots]), batch)
        if decoding:  # one stage a row: the angles are the same in all layers
            stage = shared.rotation.stage(positions[:, 0] + 1)
            every = shared.angles(cache.posenc_positions, stage)
            note_angles(cache, link, (shared.angles(positions, stage), every))
    seen = slice(first, first + count)
    angles = None
    if decoding:
        of_query, (cos, sin) = cache.posenc_angles[link.suffix]
        angles = (of_query, (cos[:, seen], sin[:, seen]))
    slot = None if isinstance(start, Tensor) else start - first
    return Call(positions, cache.posenc_positions[:, seen], slot, False, angles)


def forgetting_call(cache: Any, slot: int, positions: Tensor, states: Tensor, mask: Tensor | None, link: Link) -> Call:
    """A call over a cache that keeps only the first and the recent tokens, and what they stand for."""
    settle(cache, slot)
    layer, length, pattern = cache.layers[slot], states.shape[1], link.shared.pattern
    assert isinstance(pattern, Banded) and pattern.far is not None and pattern.far.first is not None
    if link.first:
        here = positions.expand(len(states), -1)
        if mask is not None:  # padding is what the last token does not see
            real = mask[:, 0, -1, -length:]
            here = torch.where(real if real.dtype == torch.bool else real == 0, here, EMPTY)
        held = getattr(cache, "posenc_positions", None) if layer.given else None
        if held is not None and len(held) != len(here):
            raise PosencError(
                f"The cache holds the positions of {len(held)} rows, and {len(here)} are read now: rows were added or "
                "taken away in a way that loses them. Fill a new cache."
            )
        every = here if held is None else torch.cat([held, here], -1)
        cache.posenc_keep = kept_slots(every, pattern.far.first, pattern.window - 1)
        cache.posenc_seen = every
        cache.posenc_positions = every if cache.posenc_keep is None else every.gather(1, cache.posenc_keep)
    layer.keep = cache.posenc_keep
    return Call(positions, cache.posenc_seen, 0 if layer.given == 0 else None, False)


def remember(cache: Any, positions: Tensor, start: Any, end: int, batch: int) -> None:
    """Note beside the keys of a cache where they stand, for the slots up to `end`: a cache itself keeps no positions.

    A cache that is cropped or reset is simply written over. Beams that change places stand alike.
    """
    stored: Tensor | None = getattr(cache, "posenc_positions", None)
    length = positions.shape[1]
    if isinstance(start, Tensor):  # a static cache: written in place, at slots that only the device knows
        if stored is None or stored.shape != (batch, end):  # what somebody else put there runs up to this text
            run_up = positions[:, :1] - start + torch.arange(end, device=positions.device)
            stored = run_up.long().expand(batch, -1).contiguous()
        slots = torch.arange(length, device=positions.device) + start
        cache.posenc_positions = stored.index_copy_(1, slots, positions.long().expand(batch, -1))
        return
    if start == 0:
        stored = positions[:, :0]
    elif stored is None:  # filled by somebody else: taken to run up to this text without a gap
        stored = positions[:, :1] - start + torch.arange(start, device=positions.device)
    rows = max(len(stored), len(positions))
    if stored.shape[1] < start or not {len(stored), len(positions)} <= {1, rows}:
        raise PosencError(
            f"The cache holds {start} tokens and the positions of {tuple(stored.shape)} (rows, tokens) are known, for "
            f"{len(positions)} rows now: it was changed in a way that loses them. Fill a new cache."
        )
    empty = max(end - start - length, 0)  # slots that a static cache has beyond its text
    rows = batch if empty else rows
    parts = [stored[:, :start].expand(rows, -1), positions.expand(rows, -1), positions.new_zeros(rows, empty)]
    cache.posenc_positions = torch.cat(parts, -1)
