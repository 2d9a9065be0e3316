"""The rotary modules of families that have them, as a patched model runs them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ..compat.pytorch import Moving
from ..core.precision import apply_but_keep_fp32
from ..schemes.frequencies import MSCALES

SEALED = "hf_posenc"
"""The `rope_type` of a model that RoPE does not describe. transformers does not know it, and refuses to build it."""
UNROTATED = (
    {"rope_type": "linear", "factor": 1e30},
    {"rope_type": "proportional", "partial_rotary_factor": 0.0},
)
"""`rope_parameters` under which transformers rotates by nothing. The first rotates by so little that no float can
tell, and most runtimes know it; the second is for configs that do not."""
STILL = 1e-20
"""Frequencies below this rotate nothing, at any position."""


class Rotary(Moving):
    """A family's own rotary module, with frequencies that stay in fp32."""

    wraps_rotary = True
    tells = False
    """Whether the angles carry the positions that they were made for, for attention layers that are not told."""

    def __init__(self, inner: nn.Module, tells: bool = False):
        super().__init__()
        self.inner, self.tells = inner, tells
        self._keep_from_initialization()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        angles = self.inner(*args, **kwargs)
        if self.tells:
            positions = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
            first: Any = angles if isinstance(angles, Tensor) else angles[0]
            first.posenc_positions = positions
        return angles

    def moved(self, move: Callable[[], object]) -> None:
        apply_but_keep_fp32(self.inner, move)
        self._keep_from_initialization()

    def _keep_from_initialization(self) -> None:
        """transformers computes frequencies anew when weights are initialized, from what the module was before."""
        for buffer in self.inner.buffers():
            buffer._is_hf_initialized = True  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):  # accelerate's hooks are those of one module
                raise
            return getattr(super().__getattr__("inner"), name)


class PlannedRotary(Rotary):
    """A rotary module for the layers of one part of a plan, beside the model's own."""

    of_plan = True


@contextmanager
def hush_transformers() -> Iterator[None]:
    """transformers cannot check the parameters of a sealed config, or those that vLLM alone reads, and says so; nobody
    need act on it."""

    def useful(record: logging.LogRecord) -> bool:
        said = record.getMessage()
        theirs = "Unrecognized keys" in said and all(name in said for name in MSCALES)
        return f"'rope_type'={SEALED!r}" not in said and not theirs

    logger = logging.getLogger("transformers.modeling_rope_utils")
    logger.addFilter(useful)
    try:
        yield
    finally:
        logger.removeFilter(useful)
