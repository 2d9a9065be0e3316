"""Attention with relative terms that look at content: exact, in blocks of queries.

Whole texts without training are left to a kernel (`relative_texts.py`); every other call is here. A block holds scores
for the keys that its queries can see. In training it is computed again for its gradient, so that nothing of the size
of all pairs stays in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.integrations.sdpa_attention import repeat_kv

from ..core.biases import Bias
from ..core.relative import Terms
from ..errors import UnsupportedCell
from .attention_call import Call
from .flash import fits
from .layouts import find_texts
from .masks import add_mask
from .relative_texts import attend as of_text
from .tiles import Span

BLOCK = 128
"""Queries whose scores are in memory at once."""
Output = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class Work:
    """One attention call."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    at: Tensor
    keys_at: Tensor
    terms: Terms
    scaling: float
    causal: bool
    """Whether keys that stand after a query are hidden, there being no mask that says so."""
    in_order: bool
    """Whether slots are positions, so that a block need not look at keys after its last query."""
    dropout: float
    softcap: float | None
    sinks: Tensor | None
    by_key: Tensor | None
    """Keys times `terms.queries`, scaled, (batch, heads, keys, rows)."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    call: Call,
    bias: Bias,
    layer: int,
    *,
    causal: bool,
    weighs: bool,
    **kwargs: Any,
) -> Output:
    """(batch, queries, heads, channels); `weighs`: whether the attention weights are wanted too."""
    if torch.compiler.is_exporting():
        raise UnsupportedCell(
            "torch.export makes one graph for all lengths, and relative terms need tables as long as the text. Export "
            "a model with a bias instead ('alibi', 't5', 'kerple'), or run this one as it is."
        )
    length = query.shape[2]
    if mask is None and causal and key.shape[2] > length > 1:  # an empty static cache: what follows is not there yet
        key, value = key[:, :, :length], value[:, :, :length]
    at, keys_at = call.query, call.key(key.shape[2])
    first, last = int(keys_at.min() - at.max()), int(keys_at.max() - at.min())
    groups, scaling = query.shape[1] // key.shape[1], kwargs.get("scaling")
    query, key = query.to(value.dtype), repeat_kv(key, groups).to(value.dtype)
    spans = _texts(module, query, key, value, mask, call, kwargs) if causal and not weighs else None
    terms: Terms = bias(layer, first, last if spans is None else 0)
    work = Work(
        query=query,
        key=key,
        value=repeat_kv(value, groups),
        mask=mask,
        at=at,
        keys_at=keys_at,
        terms=terms,
        scaling=(query.shape[-1] ** -0.5 if scaling is None else scaling) * terms.scale,
        causal=causal and mask is None,
        in_order=causal and mask is None and length == key.shape[2] and call.without_gaps(False),
        dropout=kwargs.get("dropout", 0.0) if module.training else 0.0,
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
        by_key=None,
    )
    if spans is not None and terms.values is None and not _trains(query, key, value, terms.keys):
        return _in_texts(work, spans), None
    if terms.queries is not None:
        work = replace(work, by_key=key @ (terms.queries.to(key.dtype) * work.scaling).mT)
    size = length if weighs else BLOCK
    run: Callable[..., Output] = partial(_block, work, weighs)
    if torch.is_grad_enabled() and length > size:
        run = partial(checkpoint, run, use_reentrant=False)
    parts = [run(start, min(start + size, length)) for start in range(0, length, size)]
    return torch.cat([part for part, _ in parts], 2).transpose(1, 2).contiguous(), parts[0][1] if weighs else None


def _texts(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, call: Call, kwargs: Any
) -> list[Span] | None:
    """The texts of a causal call, where all of it can be left to a kernel."""
    odd = (kwargs.get("dropout") and module.training) or kwargs.get("softcap") or kwargs.get("s_aux") is not None
    if odd or torch.compiler.is_compiling() or not fits(query, value):
        return None
    at, keys_at = call.query, call.key(key.shape[2])
    if query.shape[2] != key.shape[2] or query.shape[2] == 1 or not bool(((keys_at == at) | (keys_at < 0)).all()):
        return None
    return find_texts(mask, at, len(query))


def _trains(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _in_texts(work: Work, spans: list[Span]) -> Tensor:
    """(batch, queries, heads, channels); zeros for tokens that are in no text."""
    output = torch.zeros_like(work.query.transpose(1, 2), memory_format=torch.contiguous_format)
    for rows, tokens in spans:
        query, key, value = (x[rows, :, tokens] for x in (work.query, work.key, work.value))
        output[rows, tokens] = of_text(query, key, value, work.terms, work.scaling).transpose(1, 2)
    return output


def _block(work: Work, weighs: bool, start: int, end: int) -> Output:
    keys = end if work.in_order and not weighs else work.key.shape[2]
    key, value, at = work.key[:, :, :keys], work.value[:, :, :keys], work.at[:, start:end]
    distance = work.keys_at[:, None, :keys] - at[:, :, None]
    scores = _scores(work, work.query[:, :, start:end], key, distance, slice(0, keys), end - keys)
    if work.mask is not None:
        scores = add_mask(scores, work.mask[:, :, start:end, :keys], scores.dtype)
    elif work.causal:
        scores = scores.masked_fill_((distance > 0)[:, None], torch.finfo(scores.dtype).min)
    if work.sinks is not None:
        column = work.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    weights = F.dropout(weights.to(value.dtype), p=work.dropout)
    output = weights @ value
    if work.terms.values is not None:
        table = work.terms.values.to(value.dtype)
        rows = _index(work.terms.rows, distance, weights.shape, table.shape[1])
        summed = weights.new_zeros(*weights.shape[:3], table.shape[1]).scatter_add(-1, rows, weights)
        output = output + summed @ table
    return output, weights if weighs else None


def _scores(work: Work, query: Tensor, key: Tensor, distance: Tensor, keys: slice, ahead: int) -> Tensor:
    """(batch, heads, queries, keys), in fp32 or more. `ahead`: how many slots the last query is past the last key."""
    terms = work.terms
    content = query if terms.content is None else query + terms.content[:, None].to(query.dtype)
    scores = (content * work.scaling) @ key.mT
    position = query if terms.position is None else query + terms.position[:, None].to(query.dtype)
    if work.in_order:
        scores = scores.add_(_skew_products(work, position, keys.stop, ahead))
    else:
        by_query = position @ (terms.keys.to(query.dtype) * work.scaling).mT
        scores = scores.add_(by_query.gather(-1, _index(terms.rows, distance, scores.shape, by_query.shape[-1])))
    if work.by_key is not None:
        rows = _index(terms.query_rows or terms.rows, distance, scores.shape, work.by_key.shape[-1])
        scores = scores.add_(work.by_key[:, :, keys].gather(-1, rows.mT).mT)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return scores if work.softcap is None else torch.tanh(scores / work.softcap) * work.softcap


def _skew_products(work: Work, query: Tensor, keys: int, ahead: int) -> Tensor:
    """Queries times the vectors of their distances to all keys, where slots tell distances.

    With a column for each distance that occurs, from the last query to the first key on, row r has key j in column
    j + queries - 1 - r: one column less from row to row, and all keys stand below each other.
    """
    length, rows = query.shape[2], work.terms.keys.shape[1]
    distances = torch.arange(1 - keys - ahead, length - ahead, device=query.device)
    vectors = work.terms.keys[:, work.terms.rows(distances).clamp(0, rows - 1)].to(query.dtype)
    found = (query * work.scaling) @ vectors.mT
    if length == 1:
        return found
    flat = found.flatten(2).narrow(2, length - 1, length * (found.shape[3] - 1))
    return flat.unflatten(2, (length, -1))[..., :keys]


def _index(rows: Callable[[Tensor], Tensor], distance: Tensor, shape: torch.Size, count: int) -> Tensor:
    """Rows of a table for each pair; what is masked may stand anywhere."""
    return rows(distance).clamp(0, count - 1)[:, None].expand(shape)
