"""Attention with a bias that trains, forward and backward in blocks of queries.

The forward pass keeps the logarithm of each softmax's sum; with it a block's weights are one exponential away, so that
the backward pass neither runs the forward one again nor holds a number per pair of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.sdpa_attention import repeat_kv

from ..compat.pytorch import once_differentiable
from .flash import fits, flash
from .sources import Part, Source

BLOCK = 128
"""Queries of a block."""
TOGETHER = {"cpu": 2**18}
"""Scores that are worked on at a time: on a CPU, few enough for its caches."""
MANY = 2**26
WRITTEN = 2**22
"""Numbers of a bias that are written at a time."""


Output = tuple[Tensor, Tensor]
"""(batch, heads, queries, channels), and the logarithms of the sums of their softmax, (batch, heads, queries)."""
Attend = Callable[["Plan", Source, Tensor, Tensor, Tensor], Output]


@dataclass(frozen=True)
class Plan:
    """What an attention call with a trained bias needs besides its tensors."""

    source: Callable[..., Source]
    """Makes the source of the bias from the trained tensors."""
    attend: Attend
    scaling: float
    mask: Tensor | None = None
    causal: bool = False
    """Whether keys after a query are hidden, beside the mask and the bias."""
    first: int | None = None
    """The slot of the first query, where nothing after a query's own slot is seen; else None."""

    def parts(self, length: int, keys: int, block: int) -> Iterator[Part]:
        for start in range(0, length, block):
            end = min(start + block, length)
            yield Part(start, end, keys if self.first is None else min(self.first + end, keys))

    def hide(self, part: Part, batch: slice, heads: slice, scores: Tensor) -> None:
        """Write -inf into scores, (rows, heads, queries, keys), or add a mask of numbers."""
        if self.causal:
            rows = torch.arange(part.end - 1, part.start - 1, -1, device=scores.device)
            scores.masked_fill_(torch.arange(part.keys, device=scores.device) > rows[:, None], -torch.inf)
        if self.mask is None:
            return
        batch, heads = (slice(None) if n == 1 else s for n, s in zip(self.mask.shape, (batch, heads), strict=False))
        mask = self.mask[batch, heads, part.start : part.end, : part.keys].flip(2)
        if mask.dtype == torch.bool:
            scores.masked_fill_(~mask, -torch.inf)
        else:
            scores.add_(mask)


class BiasedAttention(torch.autograd.Function):
    """softmax(q k^T * scaling + bias) v, (batch, heads, queries, channels)."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, query: Tensor, key: Tensor, value: Tensor, *trained: Tensor) -> Tensor:
        tensors = [x.detach() for x in (query, key, value)]
        output, sums = plan.attend(plan, plan.source(*trained), *tensors)
        ctx.plan = plan
        ctx.save_for_backward(query, key, value, output, sums, *trained)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, sums, *trained = ctx.saved_tensors
        source = ctx.plan.source(*trained)
        found = _backward(ctx.plan, source, query, key, value, output, sums, gradient)
        return None, *found, *source.gradients()


def attend(plan: Plan, source: Source, query: Tensor, key: Tensor, value: Tensor) -> Output:
    """On a CPU by torch's own kernel."""
    flashes = fits(query, value)
    output, sums = _room(query, value)
    for part in plan.parts(query.shape[2], key.shape[2], 2 * BLOCK if flashes else BLOCK):
        here = slice(part.start, part.end)
        source.begin(part)
        found, logs = (_attend_by_flash if flashes else _attend_by_scores)(plan, part, source, query, key, value)
        output[:, :, here], sums[:, :, here] = found.flip(2), logs.flip(2)
    return output, sums


def _room(query: Tensor, value: Tensor) -> Output:
    """Laid out as attention's caller wants it."""
    batch, heads, length, _ = query.shape
    output = query.new_empty(batch, length, heads, value.shape[3]).transpose(1, 2)
    return output, query.new_empty(batch, heads, length, dtype=precision(query))


def precision(query: Tensor) -> torch.dtype:
    """What scores are computed in."""
    return torch.promote_types(query.dtype, torch.float32)


def _attend_by_flash(plan: Plan, part: Part, source: Source, query: Tensor, key: Tensor, value: Tensor) -> Output:
    batch, heads, _, _ = query.shape
    key, value = (repeat_kv(x[:, :, : part.keys], heads // x.shape[1]) for x in (key, value))
    query = query[:, :, part.start : part.end].flip(2)
    # Some heads at a time, as far as there is work for each thread: what is written of a bias stays small.
    some = max(WRITTEN // (batch * part.length * part.keys), torch.get_num_threads() // 4, 1)
    found = []
    for head in range(0, heads, some):
        chosen = slice(head, min(head + some, heads))
        rows = source.rows(part, slice(None), chosen).expand(batch, -1, -1, -1)
        if plan.mask is not None or plan.causal:
            rows = rows.clone(memory_format=torch.contiguous_format)
            plan.hide(part, slice(None), chosen, rows)
        found.append(flash(query[:, chosen], key[:, chosen], value[:, chosen], rows, False, plan.scaling))
    outputs, sums = zip(*found, strict=True)
    return torch.cat(outputs, 1), torch.cat(sums, 1)


def _attend_by_scores(
    plan: Plan, part: Part, source: Source, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    output, sums = _room(query[:, :, part.start : part.end], value)
    for place in _places(part, query, key):
        q, k, v = place.queries(query), place.keys(key), place.keys(value)
        rows = source.rows(part, place.batch, place.heads)
        scores = place.scores(plan, rows, sums.new_zeros(1, 1, 1), q, k, place.room(sums))
        logs = scores.logsumexp(-1)
        logs = logs.masked_fill(logs == -torch.inf, 0.0)  # of a query that sees nothing, and gets zeros
        weights = (scores - logs[..., None]).exp_().view(*q.shape[:2], -1)
        output[place.batch, place.heads] = place.apart(weights @ v).to(output.dtype)
        sums[place.batch, place.heads] = logs
    return output, sums


class Place(NamedTuple):
    """Some rows and heads of a block. Heads that share a key are one matrix of queries."""

    part: Part
    batch: slice
    groups: slice
    """Heads of keys."""
    heads: slice
    """Heads of queries."""
    shape: tuple[int, int, int, int]
    """(rows, heads, queries, keys)."""

    def queries(self, x: Tensor) -> Tensor:
        """(rows * groups, queries of all heads of a group, channels), the last query first."""
        chosen = x[self.batch, self.heads, self.part.start : self.part.end].flip(2).to(precision(x))
        return chosen.reshape(self._units, -1, x.shape[3])

    def keys(self, x: Tensor) -> Tensor:
        """(rows * groups, keys, channels)."""
        chosen = x[self.batch, self.groups, : self.part.keys].flatten(0, 1)
        return chosen.to(precision(x))

    def view(self, x: Tensor) -> Tensor:
        """The same, to be written to."""
        return x[self.batch, self.groups, : self.part.keys].view(self._units, self.part.keys, x.shape[3])

    def apart(self, x: Tensor) -> Tensor:
        """(rows, heads, queries, channels) of (rows * groups, queries of all heads of a group, channels)."""
        return x.view(*self.shape[:3], -1)

    def room(self, like: Tensor, more: int = 0) -> Tensor:
        """For so many scores, and as many more for each query."""
        rows, heads, queries, keys = self.shape
        return like.new_empty(rows * heads * queries * (keys + more))

    def scores(self, plan: Plan, rows: Tensor, less: Tensor, query: Tensor, key: Tensor, room: Tensor) -> Tensor:
        """Bias, mask and scores, `less` a number per query: (rows, heads, queries, keys)."""
        scores = room[: math.prod(self.shape)].view(self.shape)
        torch.sub(rows, less[..., None], out=scores)
        plan.hide(self.part, self.batch, self.heads, scores)
        scores.view(*query.shape[:2], -1).baddbmm_(query, key.mT, alpha=plan.scaling)
        return scores

    @property
    def _units(self) -> int:
        return self.shape[0] * (self.groups.stop - self.groups.start)


def _places(part: Part, query: Tensor, key: Tensor) -> Iterator[Place]:
    batch, heads, groups = query.shape[0], query.shape[1], key.shape[1]
    each = heads // groups
    together = max(TOGETHER.get(query.device.type, MANY) // (each * part.length * part.keys), 1)
    some, rows = min(together, groups), max(together // groups, 1)
    for row in range(0, batch, rows):
        for group in range(0, groups, some):
            b, g = slice(row, min(row + rows, batch)), slice(group, min(group + some, groups))
            h = slice(g.start * each, g.stop * each)
            yield Place(part, b, g, h, (b.stop - b.start, h.stop - h.start, part.length, part.keys))


def _backward(
    plan: Plan,
    source: Source,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    sums: Tensor,
    gradient: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values; `source` takes that of the bias.

    With weights P and dP = dO v^T, that of the scores is dS = P * (dP - the sum of O * dO over channels).
    """
    # Weights that are all but zero are made zero: sums do not see them, and processors are slow with such numbers.
    floor = 0.75 * math.log(torch.finfo(sums.dtype).tiny)
    common = (output.to(sums.dtype) * gradient).sum(-1)
    of_query = torch.empty_like(query)
    of_key, of_value = (sums.new_zeros(x.shape) for x in (key, value))
    for part in plan.parts(query.shape[2], key.shape[2], BLOCK):
        source.begin(part)
        here = slice(part.start, part.end)
        places = list(_places(part, query, key))
        room, wide = places[0].room(sums), places[0].room(sums, part.length)  # the largest; the others fit in
        for place in places:
            batch, heads = place.batch, place.heads
            q, k, v, out = place.queries(query), place.keys(key), place.keys(value), place.queries(gradient)
            rows = source.rows(part, batch, heads)
            weights = place.scores(plan, rows, sums[batch, heads, here].flip(2), q, k, room)
            weights = F.threshold(weights, floor, -torch.inf, inplace=True).exp_().view(*q.shape[:2], -1)
            padded = wide[: weights.numel() // part.keys * (part.keys + part.length)].view(*q.shape[:2], -1)
            padded[..., part.keys :] = 0
            of_scores = padded[..., : part.keys]
            of_scores.copy_(common[batch, heads, here].flip(2).neg_().reshape(*q.shape[:2], 1))
            of_scores.baddbmm_(out, v.mT).mul_(weights)
            source.take(part, batch, heads, padded.view(*place.shape[:3], -1))
            place.view(of_value).baddbmm_(weights.mT, out)
            place.view(of_key).baddbmm_(of_scores.mT, q, alpha=plan.scaling)
            of_query[batch, heads, here] = place.apart(of_scores @ k).flip(2).mul_(plan.scaling).to(query.dtype)
        source.finish(part)
    return of_query, of_key.to(key.dtype), of_value.to(value.dtype)
