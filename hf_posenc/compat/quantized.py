"""bitsandbytes: layers that hold their weights in 4 bits."""

from __future__ import annotations

from typing import Any

REPACKS = "support_avx512bf16_for_cpu"


def keep_packing(model: Any) -> None:
    """Let layers in 4 bits keep their weights as they are.

    On some CPUs (AVX-512 with bf16) bitsandbytes packs them anew at the first look without gradients: scales are
    rounded to bf16 for good, and rows that are not made of whole blocks end in an error.
    """
    for module in model.modules():
        if hasattr(module, REPACKS):
            setattr(module, REPACKS, False)
