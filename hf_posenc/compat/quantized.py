"""bitsandbytes: layers that hold their weights in 4 bits."""

from __future__ import annotations

from typing import Any

REPACKS = "support_avx512bf16_for_cpu"


def keep_packing(model: Any) -> None:
    """Stop bitsandbytes from packing 4-bit weights anew.

    On some CPUs (AVX-512 with bf16) it does so in the first forward without gradients. That rounds scales to bf16 for
    good, and raises an error for rows that are not made of whole blocks.
    """
    for module in model.modules():
        if hasattr(module, REPACKS):
            setattr(module, REPACKS, False)
