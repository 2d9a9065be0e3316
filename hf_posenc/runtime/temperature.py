"""Multiplies queries by a temperature. `attention.py` calls this, and nothing else does it."""

from __future__ import annotations

import torch
from torch import Tensor

from .attention_call import Call
from .masks import boolean_mask
from .positions import Link


def scale_queries(query: Tensor, link: Link, call: Call, mask: Tensor | None, keys: int, causal: bool) -> Tensor:
    """Multiply queries, (batch, heads, queries, channels), by their factors. `keys`: the number of keys."""
    temperature = link.temperature
    if temperature is None:
        return query
    if not causal:
        factors = temperature(_text_length(call, mask, keys))[..., None]
    elif torch.is_grad_enabled() and temperature.trains:
        factors = temperature(call.query + 1)[..., None]
    else:
        factors = link.shared.factors(call.query, lambda: temperature(call.query + 1)[..., None], link.first)
    # In fp32: a factor rounded to half precision would scale all channels of a query by the same error.
    scaled = query * factors
    return scaled if scaled.dtype == query.dtype else scaled.to(query.dtype)


def _text_length(call: Call, mask: Tensor | None, keys: int) -> Tensor:
    """The number of tokens without padding that each query of an encoder sees: (batch or 1, queries)."""
    if mask is None:
        return torch.full_like(call.query, keys)
    return boolean_mask(mask)[:, 0].any(1).sum(-1, keepdim=True).expand(-1, call.query.shape[1])
