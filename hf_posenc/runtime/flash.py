"""torch's attention kernel for CPUs, which also returns the log-sum-exp of each query's scores."""

from __future__ import annotations

from torch import Tensor

from ..compat import pytorch

Part = tuple[Tensor, Tensor]
"""Outputs (batch, heads, queries, channels), and the log-sum-exp of the same queries, (batch, heads, queries)."""


def fits(query: Tensor, value: Tensor) -> bool:
    """Whether the kernel can be used for these tensors. If not, callers use slower ways."""
    known = query.device.type == "cpu" and query.dtype in pytorch.CPU_ATTENTION
    return known and query.shape[-1] == value.shape[-1]


def flash(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scaling: float
) -> tuple[Tensor, Tensor]:
    """Outputs, and the log-sum-exp of each query in fp32 or more.

    A query that sees nothing gets zeros. The mask is additive, in fp32 or more, and may be combined with `causal`: the
    kernel then skips later keys, which torch's public function cannot do with a mask.
    """
    return pytorch.cpu_attention(query, key, value, causal=causal, scaling=scaling, mask=mask)


def flash_gradients(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, whole: Part, causal: bool, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """What some of the keys contribute to the gradients of queries, keys and values. `whole`: outputs and log-sum-exp
    over all keys that the queries see."""
    return pytorch.cpu_attention_gradients(gradient, query, key, value, *whole, causal=causal, scaling=scaling)
