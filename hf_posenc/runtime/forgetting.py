"""Attention with a number per key from hidden states (FoX, CABLE), which is added in the same ways as ALiBi's bias.

The number becomes extra channels of keys, which works with any kernel and with autograd. Without training, torch's
kernel for CPUs adds it together with its own causal mask.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.sdpa_attention import repeat_kv

from ..compat.pytorch import assert_later
from ..errors import PosencError
from . import flash
from .attention_call import Call
from .masks import add_mask, boolean_mask, runs

RANGE = 256.0
"""A factor moved from keys to queries, because fp16 ends at 65,504."""
PARTS = {torch.bfloat16: 3, torch.float16: 3}
"""How many channels of a dtype hold a number of fp32."""
RENDERINGS = ("row", "columns")
GAPS = (
    "The attention mask hides tokens between those that a query sees (a tree of drafts), and a compiled graph sums "
    "the gates of whole texts. Run this model uncompiled."
)


def key_biases(call: Call, mask: Tensor | None, keys: int) -> Tensor:
    """The bias of each key, up to a constant per query, (batch, heads, 1 or queries, keys): the negated sum of the
    gates up to it, of tokens that are seen. The middle of the range is subtracted, so that smaller numbers are
    rounded."""
    assert call.gates is not None
    gates = call.gates[..., None, :keys]
    if mask is not None:
        gates = gates.masked_fill(~_counted(mask)[..., :keys], 0.0)
    sums = gates.cumsum(-1)
    return (sums[..., -1:] + sums[..., :1]).detach() / 2 - sums


def _counted(mask: Tensor) -> Tensor:
    """Whose gates count: a token that a query does not see says nothing about what it sees behind it.

    Padding is seen by nobody, and texts are seen without gaps, so that one number per key is enough. Where other
    tokens lie between those that a query sees, as in a tree of drafts, each query has its own sums.
    """
    found = runs(mask)
    if torch.compiler.is_compiling():
        assert_later(found.whole, GAPS)
    elif not bool(found.whole):
        return boolean_mask(mask)
    return found.real[:, :, None]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    call: Call,
    scaling: float,
    causal: bool,
    dropout: float,
    rendering: str | None = None,
) -> Tensor:
    """(batch, queries, heads, channels)."""
    if rendering not in (None, *RENDERINGS):
        raise PosencError(
            f"The rendering {rendering!r} does not fit this scheme. Choose one of: {', '.join(RENDERINGS)}."
        )
    rows, groups = key_biases(call, mask, key.shape[2]), query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    if rows.shape[2] > 1:
        return _of_rows(query, key, value, add_mask(rows, mask, rows.dtype), scaling, dropout)
    numbers = rows[:, :, 0]
    inputs = (query, key, value, numbers)
    trains = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    square = causal and mask is None and query.shape[2] == key.shape[2] and dropout == 0.0
    if square and not trains and not torch.compiler.is_compiling() and flash.fits(query, value):
        if rendering != "columns":
            row = numbers[:, :, None].expand(-1, -1, query.shape[2], -1)
            return flash.flash(query, key, value, row, True, scaling)[0].transpose(1, 2).contiguous()
    elif rendering == "row":
        raise PosencError(
            "The rendering 'row' does not fit this call. set_rendering(model, None) lets the package choose."
        )
    columns = _parts(numbers / (scaling * RANGE), query.dtype)
    size, more = value.shape[-1], columns.shape[-1]
    query = torch.cat([query, query.new_full((*query.shape[:3], more), RANGE)], -1)
    key = torch.cat([key, columns], -1)
    value = F.pad(value, (0, query.shape[-1] - size))  # kernels need the same size for q, k and v
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal and mask is None, scale=scaling
    )
    return output[..., :size].transpose(1, 2).contiguous()


def _of_rows(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scaling: float, dropout: float) -> Tensor:
    """With a bias for each pair, in its own precision."""
    q, k, v = (x.to(bias.dtype) for x in (query, key, value))
    output = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=scaling)
    return output.to(value.dtype).transpose(1, 2).contiguous()


def _parts(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers as a sum of several of `dtype`, one in each channel: (..., channels)."""
    parts, rest = [], numbers
    for _ in range(PARTS.get(dtype, 1)):
        parts.append(rest.to(dtype))
        rest = rest - parts[-1].to(numbers.dtype)
    return torch.stack(parts, -1)
