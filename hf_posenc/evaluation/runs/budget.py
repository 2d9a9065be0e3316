"""An estimate of the memory that a run needs, before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...compat.models import attention_of, value_of
from ...errors import PosencError
from ...extras import require
from ...patching.patch_state import unwrap_model

GB = 2**30


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Peak bytes of a pass, in addition to the model itself."""

    rows: int
    length: int
    states: int
    """Hidden states before and after a layer."""
    layer: int
    """Intermediate values of one layer."""
    logits: int
    """Logits of the tokens in one slice."""
    cache: int

    @property
    def total(self) -> int:
        return self.states + self.cache + max(self.layer, self.logits)

    def __str__(self) -> str:
        parts = {"hidden states": self.states, "a layer": self.layer, "logits": self.logits, "KV cache": self.cache}
        shown = ", ".join(f"{name} {size / GB:.2f}" for name, size in parts.items() if size)
        return f"{self.total / GB:.2f} GB for {self.rows} x {self.length} tokens ({shown})"


def estimate(
    model: Any, rows: int, length: int, chunk: int, cached: bool = False, step: int | None = None
) -> Estimate:
    """Estimate a pass over `rows` texts of `length` tokens, `step` at a time if given, from the config."""
    inner = unwrap_model(model)
    config, size = inner.config.get_text_config(), inner.dtype.itemsize
    hidden, heads = config.hidden_size, config.num_attention_heads
    inside = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * hidden
    head = value_of(config, "head_dim") or hidden // heads
    kept = value_of(config, "num_key_value_heads") or heads
    tokens, once = rows * length, rows * min(step or length, length)
    scores = 0
    if attention_of(config).endswith("eager"):
        scores = once * heads * length * (size + 4)
    return Estimate(
        rows=rows,
        length=length,
        states=2 * once * hidden * size,
        layer=max(3 * once * inside * size, 4 * once * heads * head * size + scores),
        logits=min(chunk, once) * config.vocab_size * (size + 4 + (4 if size < 4 else 0)),
        cache=2 * config.num_hidden_layers * tokens * kept * head * size if cached else 0,
    )


def available_memory(device: torch.device) -> int:
    """Free bytes on the device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    psutil = require("psutil", "cli", "Measuring how much memory is free")
    return int(psutil.virtual_memory().available)


def refuse_oversized(model: Any, wanted: Estimate, force: bool) -> None:
    free = available_memory(model.device)
    if wanted.total > free and not force:
        raise PosencError(
            f"This needs about {wanted}, and {free / GB:.2f} GB are free. Use shorter lengths, a smaller "
            "batch size or a narrower dtype, read in parts with a cache (--step 4096), or run anyway with --force "
            "(force=True)."
        )
