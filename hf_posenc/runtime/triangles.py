"""Zones of one whole text as triangles and squares that torch's own kernel takes without a mask.

The kernel gives the logarithm of each softmax's sum beside its output: with it parts over different keys are put
together exactly. A band of keys is a row of triangles; the keys that are further away are one triangle more.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..compat import pytorch
from ..core.patterns import Banded, Chunked, Pattern
from .positions import rotate

HEADS = 1
"""Heads that are worked on at a time: what is rotated for them is all that is in memory beside the output. One head is
cut into blocks without a copy."""
Part = tuple[Tensor, Tensor]
"""Outputs, and the logarithms of the sums behind them, of the same queries."""


def fits(pattern: Pattern, dtype: torch.dtype) -> bool:
    return isinstance(pattern, (Banded, Chunked)) and pattern.causal and dtype in pytorch.CPU_ATTENTION


def attend(work: Any) -> Tensor:
    """(batch, heads, queries, channels), for a causal pass over one text without holes."""
    # Laid out as attention's caller wants it, so that it is not copied again.
    output = torch.empty_like(work.query.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
    zones = _banded if isinstance(work.pattern, Banded) else _chunked
    for start in range(0, work.query.shape[1], HEADS):
        heads = slice(start, start + HEADS)
        output[:, heads] = zones(work, work.query[:, heads], work.key[:, heads], work.value[:, heads])
    return output


def _flash(query: Tensor, key: Tensor, value: Tensor, causal: bool, scaling: float) -> Part:
    return pytorch.cpu_attention(query, key, value, causal=causal, scaling=scaling)


def _join(total: Part, first: int, part: Part) -> None:
    """Take a part of the queries from `first` on into the total, in place."""
    rows = slice(first, first + part[1].shape[-1])
    output, sums = total[0][..., rows, :], total[1][..., rows]
    both = torch.logaddexp(sums, part[1])
    output.mul_((sums - both).exp()[..., None]).add_(part[0].mul_((part[1] - both).exp()[..., None]))
    sums.copy_(both)


def _rotated(work: Any, x: Tensor, positions: Tensor) -> Tensor:
    if work.shared.rotation is None:
        return x
    return rotate(x, work.shared.angles(positions), work.shared.layout)


def _banded(work: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    pattern, scaling, length = work.pattern, work.scaling, query.shape[2]
    window = min(pattern.window, length)
    total = _band(_rotated(work, query, work.at), _rotated(work, key, work.keys_at), value, window, scaling)
    if pattern.far is None or length <= window:
        return total[0]
    keys = length - window if pattern.far.first is None else min(pattern.far.first, length - window)
    late = _rotated(work, query[:, :, window:], pattern.far.query(work.at[:, window:]))
    early = _rotated(work, key[:, :, :keys], pattern.far.key(work.keys_at[:, :keys]))
    if pattern.far.first is None:
        _join(total, window, _flash(late, early, value[:, :, :keys], True, scaling))
        return total[0]
    # Of the first keys, those that are still near to the first of these queries form a triangle.
    _join(total, window, _flash(late[:, :, :keys], early, value[:, :, :keys], True, scaling))
    if late.shape[2] > keys:
        _join(total, window + keys, _flash(late[:, :, keys:], early, value[:, :, :keys], False, scaling))
    return total[0]


def _band(query: Tensor, key: Tensor, value: Tensor, window: int, scaling: float) -> Part:
    """Queries and the `window` keys up to them, in blocks as long as the window.

    In its own block a query sees the keys up to it; of the block before, those after its place there. Read backwards
    that is a triangle as well.
    """
    batch, length = len(query), query.shape[2]
    blocks = -(-length // window)
    q, k, v = (_blocked(x, blocks, window) for x in (query, key, value))
    output, sums = _flash(q, k, v, True, scaling)
    if blocks > 1 and window > 1:
        before, after = slice(0, blocks - 1), slice(1, blocks)
        later = _unblocked(q, batch)[:, after].flatten(0, 1).flip(2)[:, :, 1:]
        k, v = (_unblocked(x, batch)[:, before].flatten(0, 1).flip(2)[:, :, :-1] for x in (k, v))
        behind = [_unblocked(x.flip(2), batch) for x in _flash(later, k, v, True, scaling)]
        _join((_unblocked(output, batch)[:, after], _unblocked(sums, batch)[:, after]), 0, (behind[0], behind[1]))
    joined = _unblocked(output, batch).transpose(1, 2).flatten(2, 3)[:, :, :length]
    return joined.contiguous(), _unblocked(sums, batch).transpose(1, 2).flatten(2, 3)[:, :, :length].contiguous()


def _blocked(x: Tensor, blocks: int, size: int) -> Tensor:
    """(batch, heads, tokens, channels) -> (batch * blocks, heads, size, channels), filled up at the end."""
    missing = blocks * size - x.shape[2]
    x = F.pad(x, (0, 0, 0, missing)) if missing else x
    return x.unflatten(2, (blocks, size)).transpose(1, 2).flatten(0, 1)


def _unblocked(x: Tensor, batch: int) -> Tensor:
    return x.unflatten(0, (batch, -1))


def _chunked(work: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    pattern, scaling, length = work.pattern, work.scaling, query.shape[2]
    size = min(pattern.chunk, length)
    chunks, batch = -(-length // size), len(query)
    place = work.at % pattern.chunk
    rotated = _rotated(work, key, work.keys_at % pattern.chunk)
    q, k, v = (_blocked(x, chunks, size) for x in (_rotated(work, query, place), rotated, value))
    output, sums = (_unblocked(x, batch).transpose(1, 2).flatten(2, 3) for x in _flash(q, k, v, True, scaling))
    total = (output[:, :, :length].contiguous(), sums[:, :, :length].contiguous())
    if chunks > 1:
        next_at = (place + pattern.chunk).clamp(max=pattern.reach - 1)
        last = torch.full_like(work.at, pattern.reach - 1)
        for start in range(size, length, size):
            here, older = slice(start, min(start + size, length)), start - size
            q = _rotated(work, query[:, :, here], next_at[:, here])
            _join(total, start, _flash(q, rotated[:, :, older:start], value[:, :, older:start], False, scaling))
            if older:
                q = _rotated(work, query[:, :, here], last[:, here])
                _join(total, start, _flash(q, rotated[:, :, :older], value[:, :, :older], False, scaling))
    return total[0]
