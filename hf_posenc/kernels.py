"""Attention with a bias that is never written out whole.

Each kernel takes transformers' attention arguments plus `bias`, a module of (query positions, key positions), and
`call`, which knows those positions.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from .positions import Call

BLOCK = 1024
"""Queries whose bias or mask is written out at once: memory is BLOCK * keys, never queries * keys."""
FEW = 16
"""Up to this many queries, writing out their bias costs less than appending columns to all keys."""


def is_causal(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    given = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if given is None else given)


def mask_rows(
    mask: Tensor | None, start: int, end: int, keys: int, causal: bool, device: torch.device
) -> Tensor | None:
    """The mask of queries start..end. No mask on a causal layer means that query i sees keys 0..i."""
    if mask is not None:
        return mask[:, :, start:end, :keys]
    if not causal:
        return None
    rows, columns = torch.arange(start, end, device=device), torch.arange(keys, device=device)
    return (columns <= rows[:, None])[None, None]


def add_mask(bias: Tensor, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Bias and mask as one additive mask in the dtype that the kernel computes in."""
    if mask is None:
        return bias.to(dtype)
    if mask.dtype == torch.bool:
        # Not -inf: a row of padding that sees nothing must not become NaN.
        return torch.where(mask, bias, torch.finfo(dtype).min).to(dtype)
    return (bias + mask).clamp(min=torch.finfo(dtype).min).to(dtype)


def sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    bias: nn.Module | None = None,
    call: Call | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """torch's scaled_dot_product_attention, with the bias in the cheapest exact form."""
    if bias is None or call is None:
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)
    if bias.key_slopes is not None and query.shape[2] > FEW:
        return _columns(module, query, key, value, mask, bias.key_slopes, call, **kwargs), None
    return _blocks(module, query, key, value, mask, bias, call, **kwargs), None


def _columns(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    slopes: Any,
    call: Call,
    scaling: float | None = None,
    **kwargs: Any,
) -> Tensor:
    """A bias of slope * key position has rank one: a few more channels of q and k hold it, and any kernel does."""
    size = query.shape[-1]
    scaling = size**-0.5 if scaling is None else scaling
    positions = call.key(key.shape[2])
    # A row does not see a constant, so positions may be counted from the middle: small numbers round less.
    middle = torch.div(positions[:, :1] + call.query[:, -1:], 2, rounding_mode="floor")
    positions = positions - middle
    q_columns, k_columns = exact_columns(slopes / scaling, positions, query.dtype)
    query = torch.cat([query, q_columns[None, :, None].expand(*query.shape[:3], -1)], -1)
    key = torch.cat([key, k_columns[:, None].expand(*key.shape[:3], -1)], -1)
    value = F.pad(value, (0, q_columns.shape[-1]))  # kernels want one size for all three
    output, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **kwargs)
    return output[..., :size]


def exact_columns(slopes: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Columns a, b in `dtype` with a @ b = slope * position, exact but for the kernel's own fp32 sums.

    Half precision holds few bits, so that slopes and positions are written as sums of parts that it does hold, and
    each pair of parts gets a column. Exact for positions within 131,072 of the middle.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return slopes.to(dtype)[:, None], positions.to(dtype)[..., None]
    # The power of two moves range from one side to the other: fp16 ends at 65,504.
    q_parts = _parts(slopes * 256, dtype, 3 if dtype == torch.bfloat16 else 2)
    k_parts = _parts(positions.float() / 256, dtype, 2)
    q_columns = [q for q in q_parts for _ in k_parts]
    k_columns = [k for _ in q_parts for k in k_parts]
    return torch.stack(q_columns, -1), torch.stack(k_columns, -1)


def _parts(numbers: Tensor, dtype: torch.dtype, count: int) -> list[Tensor]:
    """Numbers of `dtype` that add up to the given ones: each takes up what those before it rounded off."""
    parts, rest = [], numbers.float()
    for _ in range(count):
        parts.append(rest.to(dtype))
        rest = rest - parts[-1].float()
    return parts


def _blocks(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: nn.Module,
    call: Call,
    **kwargs: Any,
) -> Tensor:
    """Any bias, for a block of queries at a time; in training each block is computed again for its gradient."""
    length = query.shape[2]
    causal = is_causal(module, kwargs) and length > 1 and mask is None
    kwargs = {**kwargs, "is_causal": False}
    if causal:
        key, value = key[:, :, :length], value[:, :, :length]
    positions = call.key(key.shape[2])

    def block(start: int, end: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        seen = end if causal else key.shape[2]
        added = bias(call.query[:, start:end], positions[:, :seen])
        rows = mask_rows(mask, start, end, seen, causal, query.device)
        rows = add_mask(added, rows, query.dtype).expand(query.shape[0], -1, -1, -1)
        part, keys, values = query[:, :, start:end], key[:, :, :seen], value[:, :, :seen]
        return sdpa_attention_forward(module, part, keys, values, rows, **kwargs)[0]

    starts = range(0, length, BLOCK)
    if len(starts) == 1:
        return block(0, length, query, key, value)
    if torch.is_grad_enabled():
        block = partial(checkpoint, block, use_reentrant=False)
    return torch.cat([block(s, min(s + BLOCK, length), query, key, value) for s in starts], 1)


def eager(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    bias: nn.Module | None = None,
    call: Call | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """The whole score matrix, to read the attention weights from and to compare the others with."""
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = (query @ key.transpose(2, 3)).float() * scaling
    if bias is not None and call is not None:
        scores = scores + bias(call.query, call.key(key.shape[2]))
    if mask is not None:
        scores = add_mask(scores, mask, torch.float32)
    weights = F.dropout(scores.softmax(-1).to(query.dtype), p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights
