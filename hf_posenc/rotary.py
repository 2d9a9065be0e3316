"""The rotary module of families that have one, rebuilt from their config."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .precision import apply_but_keep_fp32

SEALED = "hf_posenc"
"""The `rope_type` of a model that RoPE does not describe: unknown to transformers unless this package is imported."""


class Rotary(nn.Module):
    """A family's own rotary module, with frequencies that stay in fp32."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> Rotary:
        apply_but_keep_fp32(self.inner, lambda: self.inner._apply(fn))
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


def unturned(config: Any, device: Any = None, seq_len: Any = None, layer_type: Any = None) -> tuple[Tensor, float]:
    """Frequencies of zero: the rotation is switched off, positions enter the model elsewhere."""
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    parameters = config.rope_parameters[layer_type] if layer_type is not None else config.rope_parameters
    return torch.zeros(int(dim * parameters.get("partial_rotary_factor", 1.0)) // 2, device=device), 1.0


# The socket that transformers offers for new kinds of RoPE. No model but those that name it is touched.
ROPE_INIT_FUNCTIONS[SEALED] = unturned
