"""Attention of a few queries, as in decoding: their scores are small enough to be written out, and each zone is taken
over the keys that are in it and no others. Keys come as the cache keeps them, or are rotated if they are few."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.patterns import Zone
from .positions import rotate

Slots = slice | Tensor
"""Keys that lie side by side, which is a view of them, or others, which is a copy."""


def fits(work: Any) -> bool:
    return not torch.compiler.is_compiling() and work.dropout == 0.0


def attend(work: Any) -> Tensor:
    """(batch, heads, queries, channels)."""
    batch, heads, length = work.query.shape[:3]
    scores, slots = [], []
    for zone in work.pattern.zones(work.at, work.keys_at):
        seen = zone.seen & (work.keys_at >= 0)[:, None, :]
        here = _slots(seen)
        if here is not None:
            scores.append(_scores(work, zone, seen[..., here], here))
            slots.append(here)
    if not scores:  # a row of padding alone
        return work.query.new_zeros((batch, heads, length, work.value.shape[-1]))
    weights = _softmax(torch.cat(scores, -1), work.sinks).to(work.value.dtype)
    output: Any = 0
    for part, here in zip(weights.split([s.shape[-1] for s in scores], -1), slots, strict=True):
        output = output + _grouped(part, work.value) @ work.value[:, :, here]
    return output.view(batch, heads, length, -1)


def _slots(seen: Tensor) -> Slots | None:
    """The keys that any query of any row sees."""
    found = seen.flatten(0, 1).any(0).nonzero()[:, 0]
    if not len(found):
        return None
    first, last = int(found[0]), int(found[-1])
    return slice(first, last + 1) if last - first + 1 == len(found) else found


def _grouped(x: Tensor, key: Tensor) -> Tensor:
    """(batch, heads, queries, n) -> (batch, heads of keys, queries of all heads that share them, n)."""
    return x.reshape(len(x), key.shape[1], -1, x.shape[-1])


def _scores(work: Any, zone: Zone, seen: Tensor, here: Slots) -> Tensor:
    """(batch, heads, queries, keys) in fp32; the least number where a pair is not in the zone or masked."""
    query, key = _rotated(work, zone, here)
    scores = (_grouped(query, key) @ key.transpose(2, 3)).float() * work.scaling
    scores = scores.view(*work.query.shape[:3], -1)
    if work.softcap is not None:
        scores = torch.tanh(scores / work.softcap) * work.softcap
    least = torch.finfo(torch.float32).min
    scores = torch.where(seen[:, None], scores, least)
    if work.mask is None:
        return scores
    mask = work.mask[..., : work.keys_at.shape[1]][..., here]
    return torch.where(mask, scores, least) if mask.dtype == torch.bool else (scores + mask).clamp(min=least)


def _rotated(work: Any, zone: Zone, here: Slots) -> tuple[Tensor, Tensor]:
    """The queries, and the keys in these slots, rotated to where the zone has them stand."""
    shared = work.shared
    if shared.rotation is None:
        return work.query, work.key[:, :, here]
    angles = shared.angles(zone.query)
    if zone.kept and work.read is not None:
        return rotate(work.query, angles, shared.layout), work.read[:, :, here]
    if zone.still:  # keys are not rotated; what scales their rotated channels is a number, which queries can take
        cos, sin = (part * shared.rotation.attention_scaling for part in angles)
        return rotate(work.query, (cos, sin), shared.layout), work.key[:, :, here]
    keys = rotate(work.key[:, :, here], shared.angles(zone.key[:, here]), shared.layout)
    return rotate(work.query, angles, shared.layout), keys


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]
