"""torch's attention kernel for CPUs, which gives the logarithm of each softmax's sum beside its output.

The operator is private: a torch without it, or with another signature, takes the slower ways that are there for
devices which never had it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

NAME = "_scaled_dot_product_flash_attention_for_cpu"
SIGNATURE = ("query", "key", "value", "dropout_p", "is_causal", "attn_mask", "scale")


@cache
def operator() -> Any | None:
    """The operator, if this torch has it as we call it."""
    found = getattr(torch.ops.aten, NAME, None)
    schema = getattr(getattr(found, "default", None), "_schema", None)
    known = schema is not None and tuple(a.name for a in schema.arguments) == SIGNATURE and len(schema.returns) == 2
    return found if known else None


def fits(query: Tensor, value: Tensor) -> bool:
    return query.device.type == "cpu" and query.shape[-1] == value.shape[-1] and operator() is not None


def flash(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scaling: float
) -> tuple[Tensor, Tensor]:
    """Outputs (batch, heads, queries, channels), and the logarithms of the sums, (batch, heads, queries), in fp32 or
    more. A query that sees nothing gets zeros. The mask is additive, in fp32 or more, and may stand beside `causal`:
    the kernel then skips what is masked, which torch's public function cannot."""
    run = operator()
    assert run is not None
    output: tuple[Tensor, Tensor] = run(query, key, value, 0.0, causal, attn_mask=mask, scale=scaling)
    return output
