"""The kernels behind `hf_posenc_sdpa` and `hf_posenc_eager`, which can also add a bias.

Each takes transformers' attention arguments, and also `bias`, a module, and `call`, which has the positions of queries
and keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..compat.models import own_eager
from ..core.biases import Bias
from . import forgetting
from .attention_call import Call
from .gradients import precision
from .masks import add_mask
from .renderings import Request, choose

HALF = (torch.bfloat16, torch.float16)


def is_causal(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Whether an attention call is causal, by its argument or by its layer."""
    given = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if given is None else given)


def sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    bias: Bias | None = None,
    call: Call | None = None,
    rendering: str | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """torch's scaled_dot_product_attention, with the bias in the cheapest exact form."""
    if bias is None or call is None:
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **kwargs)
    length = query.shape[2]
    causal = is_causal(module, kwargs) and length > 1 and mask is None
    if causal and key.shape[2] > length:  # a static cache at its start: the slots after the queries are empty
        key, value = key[:, :, :length], value[:, :, :length]
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key = query.to(value.dtype), key.to(value.dtype)  # under autocast rotated tensors are fp32
    if bias.of_content:
        given = (query, key, value, mask, call, scaling, causal, float(kwargs.get("dropout", 0.0)))
        return forgetting.attend(*given, rendering=rendering), None
    request = Request(module, query, key, value, mask, bias, call, scaling, causal, kwargs)
    return choose(request, rendering).run(request), None


def eager(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    bias: Bias | None = None,
    call: Call | None = None,
    rendering: str | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The family's own eager attention, with its sinks and soft caps. The bias is added to the mask."""
    if bias is not None and call is not None and bias.of_content:
        numbers = forgetting.key_biases(call, mask, key.shape[2])
        mask = add_mask(numbers.expand(-1, -1, query.shape[2], -1), mask, torch.float32)
    elif bias is not None and call is not None:
        mask = add_mask(bias(call.query, call.key(key.shape[2]), precision(query)), mask, torch.float32)
    elif mask is not None and mask.dtype == torch.bool:  # the mask of a stage: eager attention needs an additive one
        mask = add_mask(torch.zeros((), device=mask.device), mask, torch.float32)
    kwargs.pop("is_causal", None)
    own, dtype = own_eager(module), value.dtype
    if mask is not None and mask.dtype == torch.float32 and dtype in HALF:
        # Some families do not cast weights to the dtype of the values before multiplying the two.
        query, key, value = query.float(), key.float(), value.float()
    output, weights = own(module, query, key, value, mask, scaling=scaling, dropout=dropout, **kwargs)
    return output.to(dtype), weights if weights is None else weights.to(dtype)
