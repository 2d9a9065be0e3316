"""How each model type is told to llama.cpp: data, and a few functions on arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
FREQS, LONG_SHORT, KEYS = "rope_freqs", "long and short factors", "keys"
"""What an architecture reads its frequencies from: a factor for each pair, two such lists, or numbers alone."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model type of transformers in llama.cpp's terms."""

    name: str
    """What llama.cpp calls it."""
    rope: str | None
    interleaved: bool = False
    """Whether it rotates neighbouring channels, so that the rows of q and k are stored in another order."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Further numbers: the key after the architecture's name -> attribute of the config."""
    change: Callable[[str, Array], Array] | None = None
    """What a tensor becomes, by its name in transformers."""
    skipped: tuple[str, ...] = ()
    """Ends of the names of tensors that llama.cpp does not have."""


def _gemma(name: str, array: Array) -> Array:
    return array + 1 if name.endswith("norm.weight") else array  # transformers adds the one when it runs


def _gpt2(name: str, array: Array) -> Array:
    conv = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
    return np.ascontiguousarray(array.T) if conv else array


RMS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
LLAMA = Architecture(name="llama", rope=FREQS, interleaved=True, keys=RMS)
ARCHITECTURES: dict[str, Architecture] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,  # a LLaMA with biases; as `qwen2` llama.cpp would read no factors
    "qwen3": Architecture(name="qwen3", rope=KEYS, keys=RMS),
    "gemma2": Architecture(
        name="gemma2",
        rope=KEYS,
        keys={
            **RMS,
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
            "attention.sliding_window": "sliding_window",
        },
        change=_gemma,
        skipped=("lm_head.weight",),
    ),
    "phi3": Architecture(name="phi3", rope=LONG_SHORT, keys=RMS),
    "gpt2": Architecture(
        name="gpt2",
        rope=None,
        keys={"attention.layer_norm_epsilon": "layer_norm_epsilon"},
        change=_gpt2,
        skipped=(".attn.bias", ".attn.masked_bias"),
    ),
}


def interleaved(array: Array, heads: int) -> Array:
    """Rows of q or k (or their bias) with the two halves of each head's channels taken in turns."""
    return array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
