"""Attention of whole texts in tiles: triangles and rectangles of queries and keys that a kernel takes without a mask.

A pattern, or a rotation that changes in stages, is laid out as tiles that together hold each pair that is seen once.
Their outputs are joined by the logarithms of the sums behind them; their gradients are taken one by one, with the
output and the sum of the whole. Nothing is stored per pair of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compat.pytorch import once_differentiable
from .attention_call import Angles
from .flash import Part, flash, flash_gradients
from .gradients import precision


class Run(NamedTuple):
    """Tokens of a text: `size` of them, or as many again `times` times, which may be apart."""

    start: int
    size: int
    times: int = 1
    apart: int = 0
    """From the beginning of one run to that of the next."""
    step: int = 1
    """From one token of a run to the next."""

    def of(self, x: Tensor) -> Tensor:
        """(batch, heads, tokens, ...) -> (batch, heads, runs, tokens of a run, ...), as a view."""
        stride = x.stride(2)
        shape = (*x.shape[:2], self.times, self.size, *x.shape[3:])
        strides = (*x.stride()[:2], self.apart * stride, self.step * stride, *x.stride()[3:])
        return x.as_strided(shape, strides, x.storage_offset() + self.start * stride)


class Tile(NamedTuple):
    """Queries and keys that meet."""

    query: Run
    key: Run
    causal: bool = False
    """Whether query i sees keys 0..i of the tile; else it sees all."""
    back: bool = False
    """Whether that is so when both are read backwards."""


class Queries(NamedTuple):
    """Queries rotated in one way, and the tiles that they are in."""

    angles: Angles | None
    tokens: slice
    tiles: Sequence[Tile]


class Keys(NamedTuple):
    """Keys rotated in one way, from the first token to `end`, and the queries that meet them so."""

    angles: Angles | None
    end: int
    queries: Sequence[Queries]


class Span(NamedTuple):
    """A text: some tokens of some rows."""

    rows: slice
    tokens: slice


class Job(NamedTuple):
    spans: Sequence[Span]
    plan: Callable[[Span], Sequence[Keys]]
    """The tiles of a text, the first of which together hold each of its tokens. Tokens are counted from its start."""
    rotate: Callable[[Tensor, Angles], Tensor]
    scaling: float


def attend(query: Tensor, key: Tensor, value: Tensor, job: Job) -> Tensor:
    """(batch, queries, heads, channels); zeros for tokens that are in no text."""
    output: Tensor = _Tiled.apply(query, key, value, job)
    return output


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, job: Job) -> Tensor:
        batch, heads, length, size = query.shape
        # Laid out as attention's caller wants it, so that it is not copied again.
        output = query.new_zeros((batch, length, heads, size))
        sums = query.new_zeros((batch, heads, length), dtype=precision(query))
        for span, layout in _spans_with_keys(job):
            for own, shared in _heads(query, key):
                qkv = (query[_at(span, own)], key[_at(span, shared)], value[_at(span, shared)])
                made, logs = _forward(*qkv, layout, job)
                output[span.rows, span.tokens, own] = made.transpose(1, 2)
                sums[_at(span, own)] = logs
        ctx.job = job
        ctx.save_for_backward(query, key, value, output, sums)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, value, output, sums = ctx.saved_tensors
        gradient, output = gradient.transpose(1, 2), output.transpose(1, 2)
        grads = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for span, layout in _spans_with_keys(ctx.job):
            for own, shared in _heads(query, key):
                places = (_at(span, own), _at(span, shared), _at(span, shared))
                qkv = (query[places[0]], key[places[1]], value[places[2]])
                whole = (output[places[0]], sums[places[0]])
                found = _backward(gradient[places[0]], qkv, whole, layout, ctx.job)
                for total, place, new in zip(grads, places, found, strict=True):
                    total[place] = new.to(total.dtype)
        return (*grads, None)


def _spans_with_keys(job: Job) -> Iterator[tuple[Span, Sequence[Keys]]]:
    for span in job.spans:
        yield span, job.plan(span)


def _heads(query: Tensor, key: Tensor) -> Iterator[tuple[slice, slice]]:
    """One head of keys at a time and those that share it: what is rotated for them is all that is in memory beside
    the output."""
    groups = query.shape[1] // key.shape[1]
    for head in range(key.shape[1]):
        yield slice(head * groups, (head + 1) * groups), slice(head, head + 1)


def _at(span: Span, heads: slice) -> tuple[slice, slice, slice]:
    return span.rows, heads, span.tokens


def _rotate(x: Tensor, angles: Angles | None, job: Job) -> Tensor:
    return x if angles is None else job.rotate(x, angles)


def _take(run: Run, x: Tensor, back: bool, heads: int) -> Tensor:
    """(batch * runs, heads, tokens of a run, ...)."""
    taken = run.of(x).transpose(1, 2).flatten(0, 1)
    taken = taken.flip(2) if back else taken
    return taken if taken.shape[1] == heads else taken.expand(-1, heads, *taken.shape[2:])


def _give_back(x: Tensor, run: Run, back: bool, heads: int) -> Tensor:
    """(batch, heads, runs, tokens of a run, ...)."""
    x = x if x.shape[1] == heads else x.sum(1, keepdim=True)
    return (x.flip(2) if back else x).unflatten(0, (-1, run.times)).transpose(1, 2)


def _forward(query: Tensor, key: Tensor, value: Tensor, layout: Sequence[Keys], job: Job) -> Part:
    output = query.new_empty(query.shape, dtype=precision(query))
    sums = output.new_full(query.shape[:3], -torch.inf)
    for keys in layout:
        rotated_key = _rotate(key[:, :, : keys.end], keys.angles, job)
        for queries in keys.queries:
            rotated_query = _rotate(query[:, :, queries.tokens], queries.angles, job)
            for tile in queries.tiles:
                run = _shift_run(queries.tokens.start, tile.query)
                taken = ((run, rotated_query), (tile.key, rotated_key), (tile.key, value))
                q, k, v = (_take(r, x, tile.back, query.shape[1]) for r, x in taken)
                _join((output, sums), tile, flash(q, k, v, None, tile.causal, job.scaling))
    return output, sums


def _shift_run(first: int, run: Run) -> Run:
    return run._replace(start=run.start - first)


def _join(total: Part, tile: Tile, made: Part) -> None:
    """Take a tile into the total, in place."""
    output, sums = (tile.query.of(x) for x in total)
    new, logs = (_give_back(x, tile.query, tile.back, x.shape[1]) for x in made)
    both = torch.logaddexp(sums, logs)
    if tile.causal and not tile.back and tile.query == tile.key:  # the first that holds these queries
        output.copy_(new)
    else:
        output.mul_((sums - both).exp()[..., None]).add_(new * (logs - both).exp()[..., None])
    sums.copy_(both)


def _backward(
    gradient: Tensor, qkv: tuple[Tensor, ...], whole: Part, layout: Sequence[Keys], job: Job
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = qkv
    exact, heads = precision(query), query.shape[1]
    of_query, of_key, of_value = (torch.zeros_like(x, dtype=exact) for x in qkv)
    output, sums = (x.contiguous() for x in whole)
    for keys in layout:
        rotated_key = _rotate(key[:, :, : keys.end], keys.angles, job)
        to_key = torch.zeros_like(rotated_key, dtype=exact)
        for queries in keys.queries:
            rotated_query = _rotate(query[:, :, queries.tokens], queries.angles, job)
            to_query = torch.zeros_like(rotated_query, dtype=exact)
            for tile in queries.tiles:
                run = _shift_run(queries.tokens.start, tile.query)
                taken = ((run, rotated_query), (tile.key, rotated_key), (tile.key, value))
                q, k, v = (_take(r, x, tile.back, heads) for r, x in taken)
                of_out, out, logs = (_take(tile.query, x, tile.back, heads) for x in (gradient, output, sums))
                made = flash_gradients(of_out, q, k, v, (out, logs), tile.causal, job.scaling)
                for total, (r, _), new in zip((to_query, to_key, of_value), taken, made, strict=True):
                    r.of(total).add_(_give_back(new, r, tile.back, total.shape[1]))
            of_query[:, :, queries.tokens] += _rotate_back(to_query, queries.angles, job)
        of_key[:, :, : keys.end] += _rotate_back(to_key, keys.angles, job)
    return of_query, of_key, of_value


def _rotate_back(x: Tensor, angles: Angles | None, job: Job) -> Tensor:
    """The gradient of what was rotated, from that of the rotated."""
    return x if angles is None else job.rotate(x, (angles[0], -angles[1]))


# --- layouts of tiles ---


def causal_tiles(start: int, end: int) -> list[Tile]:
    """Tokens start..end, each with those from start up to it."""
    run = Run(start, end - start)
    return [Tile(run, run, causal=True)]


def blocks(length: int, size: int) -> list[Tile]:
    """A text in blocks, each token with those of its block up to it."""
    whole = length // size
    run = Run(0, size, whole, size)
    tiles = [Tile(run, run, causal=True)] if whole else []
    return tiles + (causal_tiles(whole * size, length) if length > whole * size else [])


def band(length: int, window: int) -> list[Tile]:
    """Each token with the `window` tokens up to it.

    In its own block of so many a token sees those up to it; of the block before, those after its place there. Read
    backwards that is a triangle as well.
    """
    window = min(window, length)
    tiles, whole = blocks(length, window), length // window
    if window > 1 and whole > 1:
        after, before = (Run(start, window - 1, whole - 1, window) for start in (window, 1))
        tiles.append(Tile(after, before, causal=True, back=True))
    rest, last = length - whole * window, (whole - 1) * window
    if rest:
        tiles.append(Tile(Run(whole * window, rest), Run(last + rest, window - rest)))
        if rest > 1:
            tiles.append(Tile(Run(whole * window, rest - 1), Run(last + 1, rest - 1), causal=True, back=True))
    return tiles


def beyond(length: int, window: int, first: int | None) -> list[Tile]:
    """Each token with those that are `window` or more before it; of these, the first ones of the text only."""
    late = length - window
    if late <= 0:
        return []
    keys = late if first is None else min(first, late)
    tiles = [Tile(Run(window, keys), Run(0, keys), causal=True)] if keys else []
    if keys and late > keys:
        tiles.append(Tile(Run(window + keys, late - keys), Run(0, keys)))
    return tiles
