"""torch's attention kernel for CPUs, which gives the logarithm of each softmax's sum beside its output."""

from __future__ import annotations

from torch import Tensor

from ..compat import pytorch

Part = tuple[Tensor, Tensor]
"""Outputs (batch, heads, queries, channels), and the logarithms of the sums behind them, of the same queries."""


def fits(query: Tensor, value: Tensor) -> bool:
    """Whether the kernel takes these; where it does not, there are slower ways."""
    known = query.device.type == "cpu" and query.dtype in pytorch.CPU_ATTENTION
    return known and query.shape[-1] == value.shape[-1]


def flash(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scaling: float
) -> tuple[Tensor, Tensor]:
    """Outputs (batch, heads, queries, channels), and the logarithms of the sums, (batch, heads, queries), in fp32 or
    more. A query that sees nothing gets zeros. The mask is additive, in fp32 or more, and may stand beside `causal`:
    the kernel then skips what is masked, which torch's public function cannot."""
    return pytorch.cpu_attention(query, key, value, causal=causal, scaling=scaling, mask=mask)


def flash_gradients(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, whole: Part, causal: bool, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """What a part of the keys adds to the gradients of queries, keys and values. `whole`: outputs and sums over all
    that the queries see."""
    return pytorch.cpu_attention_gradients(gradient, query, key, value, *whole, causal=causal, scaling=scaling)
