"""The rotary module of families that have one, rebuilt from their config."""

from __future__ import annotations

from typing import Any

from torch import nn

from .precision import apply_but_keep_fp32

SEALED = "hf_posenc"
"""The `rope_type` of a model that RoPE does not describe. transformers does not know it, and refuses to build it."""

UNTURNED = {"rope_type": "proportional", "partial_rotary_factor": 0.0}
"""transformers' words for a rotation by nothing."""


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
