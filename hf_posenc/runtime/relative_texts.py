"""Causal attention with relative terms over whole texts, in blocks of queries, by torch's kernel for CPUs.

The products of queries with the vectors of distances form a matrix with a row per query and a column per distance. In
each row the keys begin one column earlier than in the row before, so that a strided view of the matrix has the keys in
its columns. That view is passed to the kernel as its mask. Beyond the reach of a table all distances share a vector.
There the product with a query is the same for all keys and cancels in the softmax, and the product with a key is one
number for all queries.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.relative import Rows, Terms
from .flash import Part, flash

BLOCK = 256
"""How many queries are computed at once."""


class Text(NamedTuple):
    """Queries, keys and values of one text, (batch, heads, tokens, channels), and the terms between them."""

    query: Tensor
    key: Tensor
    value: Tensor
    terms: Terms
    scaling: float
    vectors: Tensor
    """The vector of each distance, from the furthest to zero, then zeros: (heads or 1, distances, channels)."""
    position: Tensor
    """Queries as they are multiplied with these vectors, scaled."""
    by_key: Tensor | None
    """The products of keys with their vectors, scaled, (batch, heads, keys, rows)."""


def attend(query: Tensor, key: Tensor, value: Tensor, terms: Terms, scaling: float) -> Tensor:
    """Causal attention of one text, (batch, heads, tokens, channels). `terms` must cover its distances up to zero."""
    text, output = _text(query, key, value, terms, scaling), torch.empty_like(query)
    for start in range(0, query.shape[2], BLOCK):
        end = min(start + BLOCK, query.shape[2])
        output[:, :, start:end] = _block(text, start, end)
    return output


def _text(query: Tensor, key: Tensor, value: Tensor, terms: Terms, scaling: float) -> Text:
    length, rows = query.shape[2], terms.keys.shape[1]
    furthest = length - 1 if terms.reach is None else min(length - 1, terms.reach + BLOCK)
    at = terms.rows(torch.arange(-furthest, 1, device=query.device)).clamp(0, rows - 1)
    vectors = terms.keys[:, at]
    if terms.reach is not None:
        vectors = vectors - _far_vector(terms.keys, terms.rows, terms.reach)
    vectors = F.pad(vectors, (0, 0, 0, BLOCK)).to(query.dtype)
    position = query if terms.position is None else query + terms.position[:, None].to(query.dtype)
    content = query if terms.content is None else query + terms.content[:, None].to(query.dtype)
    by_key = None if terms.queries is None else key @ (terms.queries.to(key.dtype) * scaling).mT
    return Text(content, key, value, terms, scaling, vectors, position * scaling, by_key)


def _far_vector(table: Tensor, rows: Rows, reach: int) -> Tensor:
    """The vector that all distances of at least `reach` share, (heads or 1, 1, channels)."""
    at = int(rows(torch.tensor([-reach], device=table.device)).clamp(0, table.shape[1] - 1))
    return table[:, at : at + 1]


def _block(text: Text, start: int, end: int) -> Tensor:
    """The outputs of queries start..end, joined from the keys beyond the reach of all of them and the other keys."""
    reach = text.terms.reach
    far = 0 if reach is None else max(start - reach + 1, 0)
    query, near = text.query[:, :, start:end], slice(far, end)
    rows = _bias_rows(text, start, end, far)
    made = flash(query, text.key[:, :, near], text.value[:, :, near], rows, False, text.scaling)
    if not far:
        return made[0]
    numbers = _far_key_numbers(text, far, query)
    return _join(made, flash(query, text.key[:, :, :far], text.value[:, :, :far], numbers, False, text.scaling))


def _bias_rows(text: Text, start: int, end: int, far: int) -> Tensor:
    """What is added to the scores of queries start..end and keys far..end, (batch, heads, queries, keys)."""
    length, keys = end - start, end - far
    width = keys + length - 1
    # Columns begin at the distance from the last query to the first key. Those past distance zero are later keys.
    first = text.vectors.shape[1] - BLOCK - keys
    columns = text.position[:, :, start:end] @ text.vectors[:, first : first + width].mT
    columns[..., keys:] = -torch.inf
    strides = (*columns.stride()[:2], width - 1, 1)
    rows = columns.as_strided((*columns.shape[:2], length, keys), strides, length - 1)
    if text.by_key is not None:
        rows.add_(_key_products(text, start, end, far))
    return rows.to(torch.promote_types(rows.dtype, torch.float32))


def _key_products(text: Text, start: int, end: int, far: int) -> Tensor:
    """The products of keys far..end with their vectors, for queries start..end, (batch, heads, queries, keys)."""
    assert text.by_key is not None
    found, of = text.by_key[:, :, far:end], text.terms.query_rows or text.terms.rows
    tokens = torch.arange(far, end, device=found.device)
    at = of(tokens[:, None] - tokens[start - far :]).clamp(0, found.shape[3] - 1)
    given: Tensor = found.gather(-1, at.expand(*found.shape[:2], -1, -1)).mT
    return given


def _far_key_numbers(text: Text, far: int, query: Tensor) -> Tensor | None:
    """The product of each of the first `far` keys with the shared vector, the same for all of these queries."""
    if text.by_key is None or text.terms.reach is None:
        return None
    of = text.terms.query_rows or text.terms.rows
    at = int(of(torch.tensor([-text.terms.reach], device=query.device)).clamp(0, text.by_key.shape[3] - 1))
    numbers = text.by_key[:, :, None, :far, at].contiguous()
    return numbers.to(torch.promote_types(numbers.dtype, torch.float32)).expand(-1, -1, query.shape[2], -1)


def _join(one: Part, other: Part) -> Tensor:
    """Join the outputs over two parts of the keys by their log-sum-exp. Each query sees some keys of either part."""
    both = torch.logaddexp(one[1], other[1])
    first, second = ((sums - both).exp()[..., None] for _, sums in (one, other))
    return (one[0] * first + other[0] * second).to(one[0].dtype)
