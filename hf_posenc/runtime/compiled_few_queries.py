"""Attention of a few queries in zones, in a compiled graph. `zones.py` calls `attend`.

A compiled graph cannot look at values. A zone with a largest number of keys (`Zone.most`) gets that many slots, which
the device finds; other zones are computed over all slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..compat.pytorch import assert_later
from ..core.patterns import Zone
from .cache_layers import select_slots
from .few_queries import Part, hide_unseen, join_parts, rotate_to_zone, scaled_products
from .masks import boolean_mask

REPEATED = (
    "Several tokens of a text stand at the same position, so that more of them are within reach than a compiled graph "
    "has room for. Give positions that rise, or run the model without torch.compile."
)
ALL = slice(None)


def attend(work: Any) -> Tensor:
    """(batch, heads, queries, channels)."""
    narrow: list[Zone] = []
    wide: list[Zone] = []
    for zone in work.pattern.zones(work.at, work.keys_at):
        zone = zone._replace(seen=zone.seen & (work.keys_at >= 0)[:, None, :])
        (wide if zone.from_cache or _slots_needed(work, zone) is None else narrow).append(zone)
    parts = [_part_of_slots(work, zone) for zone in narrow]
    return join_parts(work, [*parts, *([_part_of_all(work, wide)] if wide else [])])


def _slots_needed(work: Any, zone: Zone) -> int | None:
    """The number of slots that surely hold all keys of a zone; None if it takes all slots."""
    if zone.most is None:
        return None
    room: int = zone.most + work.query.shape[2] - 1
    return room if room < work.keys_at.shape[1] else None


def _part_of_slots(work: Any, zone: Zone) -> Part:
    """One zone, over the slots that any of its queries sees."""
    room, batch = _slots_needed(work, zone), len(work.query)
    assert room is not None
    seen = zone.seen.expand(batch, -1, -1)
    if work.mask is not None:
        seen = seen & boolean_mask(work.mask[..., : seen.shape[2]]).any(1)
    count = seen.any(1).cumsum(-1)
    assert_later((count[:, -1] <= room).all(), REPEATED)
    which = torch.arange(1, room + 1, device=count.device).expand(batch, -1).contiguous()
    slots = torch.searchsorted(count, which).clamp(max=count.shape[1] - 1)
    at, mask = slots[:, None, :], work.mask
    taken = work._replace(
        key=select_slots(work.key, slots),
        value=select_slots(work.value, slots),
        keys_at=work.keys_at.expand(batch, -1).gather(1, slots),
        mask=None if mask is None else _gather_columns(mask.expand(batch, -1, -1, -1), at[:, None]),
    )
    seen = _gather_columns(seen, at) & (which <= count[:, -1:])[:, None, :]
    zone = zone._replace(key=zone.key.expand(batch, -1).gather(1, slots))
    product = scaled_products(taken, *rotate_to_zone(taken, zone, ALL))
    return Part(hide_unseen(taken, product, seen, ALL), taken.value)


def _gather_columns(x: Tensor, at: Tensor) -> Tensor:
    """The columns `at` of a matrix of queries and keys; dimensions before the queries are broadcast."""
    return x.gather(-1, at.expand(*x.shape[:-1], -1))


def _part_of_all(work: Any, zones: Sequence[Zone]) -> Part:
    """Several zones, over all slots. Zones with the same rotated keys are computed as one product."""
    scores: Tensor | None = None
    kept = [zone for zone in zones if zone.from_cache]
    for alike in [*([kept] if kept else []), *([zone] for zone in zones if not zone.from_cache)]:
        turned = [rotate_to_zone(work, zone, ALL) for zone in alike]
        product = scaled_products(work, torch.cat([query for query, _ in turned], 2), turned[0][1])
        for zone, found in zip(alike, product.chunk(len(alike), 2), strict=True):
            least = torch.finfo(found.dtype).min
            scores = torch.where(zone.seen[:, None], found, least if scores is None else scores)
    assert scores is not None
    seen = torch.stack([zone.seen for zone in zones]).any(0)
    return Part(hide_unseen(work, scores, seen, ALL), work.value)
