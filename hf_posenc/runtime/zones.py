"""Exact attention for patterns, zone by zone. `attention.py` calls `attend_in_zones`.

Whole texts are computed in tiles and few queries at once. Any other call is computed in blocks of queries, so that the
scores of all pairs of tokens are never in memory together.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.integrations.sdpa_attention import repeat_kv

from ..core.patterns import Pattern
from . import compiled_few_queries, few_queries, layouts, tiles
from .attention_call import Call
from .positions import FEW, Positions
from .rotation import rotate

BLOCK = 256
"""How many queries have their scores in memory at once."""


class Work(NamedTuple):
    """The inputs of one attention call."""

    query: Tensor
    key: Tensor
    """With the model's number of key heads. It is repeated for all query heads only in `in_blocks`."""
    value: Tensor
    mask: Tensor | None
    """Additive or boolean, (batch, 1 or heads, queries, keys)."""
    at: Tensor
    """Positions of the queries, (batch or 1, queries)."""
    keys_at: Tensor
    """Positions of the keys, (batch or 1, keys)."""
    pattern: Pattern
    shared: Positions
    scaling: float
    dropout: float
    softcap: float | None
    sinks: Tensor | None
    """A number per head that is added to every softmax and has no value (attention sinks)."""
    read: Tensor | None
    """The keys as the cache keeps them, rotated to `pattern.cached_positions`; None if it does not keep them."""


def attend_in_zones(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    call: Call,
    shared: Positions,
    *,
    causal: bool,
    weighs: bool,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The output, (batch, queries, heads, channels), and with `weighs` the attention weights."""
    pattern = shared.pattern
    assert pattern is not None
    length, stored = query.shape[2], key
    if mask is None and causal and key.shape[2] > length > 1 and not shared.forgets:
        # a static cache at its start: the slots after the queries are empty
        key, value = key[:, :, :length], value[:, :, :length]
    at, keys_at = call.query, call.key(key.shape[2])
    scaling = kwargs.get("scaling")
    work = Work(
        query=query,
        key=key,
        value=value,
        mask=mask,
        at=at,
        keys_at=keys_at,
        pattern=pattern,
        shared=shared,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        dropout=kwargs.get("dropout", 0.0) if module.training else 0.0,
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
        read=call.keys_read(stored),
    )
    bare = not work.dropout and work.softcap is None and work.sinks is None
    if causal and bare and not weighs:
        job = layouts.plan_job(work.query, key, value, mask, at, keys_at, shared, work.scaling)
        if job is not None:
            return tiles.attend(work.query, key, value, job), None
    if (
        not weighs and few_queries.can_attend(work) and length <= FEW
    ):  # checked last: an exported graph for any length has no fixed `length`
        attend = compiled_few_queries.attend if torch.compiler.is_compiling() else few_queries.attend
        return attend(work).transpose(1, 2).contiguous(), None
    return in_blocks(work, causal and mask is None, weighs)


def in_blocks(work: Work, causal: bool, weighs: bool) -> tuple[Tensor, Tensor | None]:
    """Attention in blocks, for any pattern, mask and device. In training each block is recomputed for its gradient."""
    length, groups = work.query.shape[2], work.query.shape[1] // work.key.shape[1]
    work = work._replace(key=repeat_kv(work.key, groups), value=repeat_kv(work.value, groups))
    whole = weighs or torch.compiler.is_exporting()  # an exported graph for any length has no fixed number of blocks
    starts = [0] if whole else range(0, length, BLOCK)
    run: Callable[..., tuple[Tensor, Tensor | None]] = partial(_block, work, causal, weighs)
    if torch.is_grad_enabled() and len(starts) > 1:
        run = partial(checkpoint, run, use_reentrant=False)
    # From the end: later blocks see more keys, and the memory that they free is large enough for the earlier ones.
    parts = [run(start, length if whole else min(start + BLOCK, length)) for start in reversed(starts)]
    output = torch.cat([part for part, _ in reversed(parts)], 2).transpose(1, 2).contiguous()
    return output, parts[0][1] if weighs else None


def _block(work: Work, causal: bool, weighs: bool, start: int, end: int) -> tuple[Tensor, Tensor | None]:
    """Attention of queries start..end over the keys that any of them sees, or over all keys if weights are wanted."""
    part = slice(start, end)
    at, keys_at = work.at[:, part], work.keys_at
    mask = None if work.mask is None else work.mask[:, :, part, : keys_at.shape[1]]
    chosen: Any = slice(None)
    if not torch.compiler.is_compiling() and not weighs:
        seen = work.pattern.visible(at, keys_at).any(0).any(0)
        chosen = slice(None) if bool(seen.all()) else seen.nonzero()[:, 0]
    key, value, keys_at = work.key[:, :, chosen], work.value[:, :, chosen], keys_at[:, chosen]
    scores = zone_scores(work, work.query[:, :, part], key, at, keys_at)
    least = torch.finfo(scores.dtype).min
    if mask is not None:
        mask = mask[..., chosen]
        scores = torch.where(mask, scores, least) if mask.dtype == torch.bool else (scores + mask).clamp(min=least)
    elif causal:
        hidden = (keys_at[:, None, :] > at[:, :, None]) | (keys_at < 0)[:, None, :]
        scores = scores.masked_fill(hidden[:, None], least)
    if work.sinks is not None:
        column = work.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    weights = F.dropout(weights.to(value.dtype), p=work.dropout)
    return weights @ value, weights if weighs else None


def zone_scores(work: Work, query: Tensor, key: Tensor, at: Tensor, keys_at: Tensor) -> Tensor:
    """Scores in fp32, each pair's from its zone. Pairs in no zone get the lowest finite number."""
    scores: Tensor | None = None
    for zone in work.pattern.zones(at, keys_at):
        q, k = query, key
        if work.shared.rotation is not None:
            q = rotate(query, work.shared.angles(zone.query), work.shared.layout)
            k = rotate(key, work.shared.angles(zone.key), work.shared.layout)
        here = (q @ k.transpose(2, 3)).float() * work.scaling
        if work.softcap is not None:
            here = torch.tanh(here / work.softcap) * work.softcap
        other = torch.finfo(torch.float32).min if scores is None else scores
        scores = torch.where(zone.seen[:, None], here, other)
    assert scores is not None
    return scores
