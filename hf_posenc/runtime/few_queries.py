"""Attention of a few queries in zones, as in decoding. `zones.py` calls `attend`.

All scores are written out, and each zone is computed over its own keys only. Rotated keys come from the cache if it
keeps them, and are rotated here otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.patterns import Zone
from .rotation import rotate

Slots = slice | Tensor
"""Indices of keys: a slice gives a view, a tensor a copy."""


class Part(NamedTuple):
    """The scores of some keys, (batch, heads, queries, keys), and the values of these keys."""

    scores: Tensor
    value: Tensor


def can_attend(work: Any) -> bool:
    """Whether this way fits a call, which is a `zones.Work`."""
    return not torch.compiler.is_exporting() and work.dropout == 0.0


def attend(work: Any) -> Tensor:
    """(batch, heads, queries, channels)."""
    parts = _zone_parts(work)
    if not parts:  # all queries are padding
        return work.query.new_zeros((*work.query.shape[:3], work.value.shape[-1]))
    return join_parts(work, parts)


def join_parts(work: Any, parts: Sequence[Part]) -> Tensor:
    """One softmax over the keys of all parts: (batch, heads, queries, channels)."""
    weights = _softmax(torch.cat([part.scores for part in parts], -1), work.sinks).to(work.value.dtype)
    output: Any = 0
    for own, part in zip(weights.split([part.scores.shape[-1] for part in parts], -1), parts, strict=True):
        output = output + group_heads(own, part.value) @ part.value
    found: Tensor = output.view(*work.query.shape[:3], -1)
    return found


def _zone_parts(work: Any) -> list[Part]:
    parts = []
    for zone in work.pattern.zones(work.at, work.keys_at):
        seen = zone.seen & (work.keys_at >= 0)[:, None, :]
        here = _seen_slots(seen)
        if here is not None:
            product = scaled_products(work, *rotate_to_zone(work, zone, here))
            parts.append(Part(hide_unseen(work, product, seen[..., here], here), work.value[:, :, here]))
    return parts


def _seen_slots(seen: Tensor) -> Slots | None:
    """The slots of the keys that any query of any row sees; None if there are none."""
    found = seen.flatten(0, 1).any(0).nonzero()[:, 0]
    if not len(found):
        return None
    first, last = int(found[0]), int(found[-1])
    return slice(first, last + 1) if last - first + 1 == len(found) else found


def group_heads(x: Tensor, key: Tensor) -> Tensor:
    """(batch, heads, queries, n) -> (batch, heads of keys, queries of all heads that share them, n)."""
    return x.reshape(len(x), key.shape[1], -1, x.shape[-1])


def scaled_products(work: Any, query: Tensor, key: Tensor) -> Tensor:
    """The scores of rotated queries and keys, scaled and soft-capped, (batch, heads, queries, keys) in fp32."""
    found = (group_heads(query, key) @ key.transpose(2, 3)).float() * work.scaling
    if work.softcap is not None:
        found = torch.tanh(found / work.softcap) * work.softcap
    return found.view(*query.shape[:3], -1)


def hide_unseen(work: Any, scores: Tensor, seen: Tensor, here: Slots) -> Tensor:
    """The scores, with the lowest finite number where a pair is not in the zone or is masked."""
    least = torch.finfo(torch.float32).min
    scores = torch.where(seen[:, None], scores, least)
    if work.mask is None:
        return scores
    mask = work.mask[..., : work.keys_at.shape[1]][..., here]
    return torch.where(mask, scores, least) if mask.dtype == torch.bool else (scores + mask).clamp(min=least)


def rotate_to_zone(work: Any, zone: Zone, here: Slots) -> tuple[Tensor, Tensor]:
    """The queries, and the keys in these slots, rotated to their positions in the zone."""
    shared = work.shared
    if shared.rotation is None:
        return work.query, work.key[:, :, here]
    angles = shared.angles(zone.query)
    if zone.from_cache and work.read is not None:
        return rotate(work.query, angles, shared.layout), work.read[:, :, here]
    if zone.still:  # keys are not rotated; queries take the keys' attention scaling as well
        cos, sin = (part * shared.rotation.attention_scaling for part in angles)
        return rotate(work.query, (cos, sin), shared.layout), work.key[:, :, here]
    keys = rotate(work.key[:, :, here], shared.angles(zone.key[:, here]), shared.layout)
    return rotate(work.query, angles, shared.layout), keys


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]
