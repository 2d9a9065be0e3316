"""Where queries and keys stand in one attention call, and how they are turned there."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, EncoderDecoderCache

from .precision import Fp32Buffers
from .registry import PosencError
from .sites import FollowingRotation, Rotation

PREFIX = "hf_posenc_"
"""Opens the names of our attention functions."""
SEAL = "hf_posenc: pip install hf-posenc, then hf_posenc.load(path)"
"""What `config.json` of a sealed model names as its attention: transformers refuses it, and prints it."""


class Positions(Fp32Buffers):
    """What the attention layers of a patched model share: how q and k are turned. Lives on the base model."""

    inv_freq: Tensor
    weights: Tensor

    def __init__(self, rotation: Rotation | None, device: torch.device):
        super().__init__()
        self.rotation = rotation
        self.rendering: str | None = None
        """How a bias is added, where not the cheapest way (`set_rendering`)."""
        inv_freq = rotation.inv_freq if rotation else ()
        weights = rotation.weights if isinstance(rotation, FollowingRotation) else ()
        self.inv_freq = nn.Buffer(torch.tensor(inv_freq, device=device, dtype=torch.float32), persistent=False)
        self.weights = nn.Buffer(torch.tensor(weights, device=device, dtype=torch.float32), persistent=False)

    @property
    def early(self) -> bool:
        """Whether keys are turned before they are cached."""
        return self.rotation is not None and not self.rotation.follows_length

    @property
    def late(self) -> bool:
        return self.rotation is not None and self.rotation.follows_length

    def angles(self, positions: Tensor, stage: Tensor | None = None) -> tuple[Tensor, Tensor]:
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


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the pairs (i, i + d/2) of each head; channels past the rotated ones are left alone."""
    cos, sin = (a[:, None].to(x.dtype) for a in angles)
    pairs = cos.shape[-1]
    first, second, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


class Link:
    """What an attention layer of a patched model holds: the way to the base model. Not a module, so not saved."""

    def __init__(self, base: nn.Module | None):
        self.base = base
        """None on cross-attention, which is left alone."""


class Call(NamedTuple):
    """What one attention call knows of positions."""

    query: Tensor
    """Positions of the queries, (batch or 1, queries)."""
    exact: bool
    """Whether the keys are the tokens of this very call, so that they stand where the queries stand."""
    first_query_slot: Any
    """Cache slot of the first query; int, or a tensor under a static cache."""
    first_slot: Any
    """Cache slot of the first key."""
    keys_turned: bool

    def key(self, length: int) -> Tensor:
        """Positions of the keys. What came from a cache is taken to run up to the queries without a gap."""
        if self.exact and length == self.query.shape[1]:
            return self.query
        slots = torch.arange(length, device=self.query.device) + self.first_slot
        last_query_slot = self.first_query_slot + self.query.shape[1] - 1
        return self.query[:, -1:] - last_query_slot + slots

    def without_gaps(self, masked: bool) -> bool:
        """Whether slots tell all distances: positions rise by one, but for padding in front, which a mask hides."""
        if torch.compiler.is_compiling() or isinstance(self.first_query_slot, Tensor):
            return False
        steps = self.query.diff(dim=-1)
        if not masked:
            return bool((steps == 1).all())
        rising = (steps.diff(dim=-1) >= 0).all()
        return bool(((steps == 0) | (steps == 1)).all() & rising)


class TurningCache:
    """Stands in for a cache during one attention call, and turns keys before they are stored."""

    def __init__(self, cache: Cache, angles: tuple[Tensor, Tensor]):
        self.cache, self.angles = cache, angles

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.cache.update(rotate(keys, self.angles), values, *args, **kwargs)


def before_attention(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of every self-attention layer: finds out where queries and keys stand."""
    name = module.config._attn_implementation
    if not name.startswith(PREFIX):
        raise PosencError(
            f"This model is patched, and its attention was then set to {name!r}, which would drop its positions. "
            f"Set it to {PREFIX + 'sdpa'!r} or {PREFIX + 'eager'!r}, or call unpatch_model first."
        )
    states = args[0] if args else kwargs["hidden_states"]
    length, past = states.shape[1], kwargs.get("past_key_values")
    cache: Any = past.self_attention_cache if isinstance(past, EncoderDecoderCache) else past
    first_query: Any = 0
    first_key: Any = 0
    if cache is not None:
        first_query = cache.get_query_offset(module.layer_idx)
        _, first_key = cache.get_mask_sizes(length, module.layer_idx)
    positions = kwargs.get("position_ids")
    if positions is None:
        positions = (torch.arange(length, device=states.device) + first_query)[None]
    exact = isinstance(first_query, int) and first_query == 0
    if cache is not None and length > 1:
        _refuse_gaps(cache, positions, first_query, module.layer_idx)
    shared = module.posenc_link.base.posenc
    turned = cache is not None and shared.early
    if turned:
        turning = TurningCache(cache, shared.angles(positions))
        if cache is past:
            kwargs["past_key_values"] = turning
        else:
            kwargs["past_key_values"] = copy.copy(past)
            kwargs["past_key_values"].self_attention_cache = turning
    kwargs["posenc_call"] = Call(positions, exact, first_query, first_key, turned)
    return args, kwargs


def _refuse_gaps(cache: Any, positions: Tensor, first_query: Any, layer_idx: Any) -> None:
    """Cached keys carry no positions: refuse to go on from text whose positions jump, rather than guess them."""
    if layer_idx != 0 or torch.compiler.is_compiling() or isinstance(first_query, Tensor):
        return
    if getattr(cache, "posenc_gaps", False) and first_query > 0:
        raise PosencError(
            "The cached text has position_ids that jump (packed documents or skipped positions), so that this call "
            "cannot tell where its keys stand. Run such text in one pass with use_cache=False."
        )
    steps = positions.diff(dim=-1)
    cache.posenc_gaps = bool(((steps != 0) & (steps != 1)).any())
