"""Wrappers of a family's own rotary module in a patched model, and `rope_parameters` that seal or do not rotate."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ..compat.pytorch import MovableModule
from ..core.precision import apply_but_keep_fp32
from ..schemes.frequencies import MSCALES

SEALED = "hf_posenc"
"""The `rope_type` of a sealed config, whose positions no other one describes. Plain transformers refuses it."""
UNROTATED = (
    {"rope_type": "linear", "factor": 1e30},
    {"rope_type": "proportional", "partial_rotary_factor": 0.0},
)
"""`rope_parameters` with which transformers does not rotate. The first rotates by less than a float can show, and most
runtimes support it; the second is for configs that do not support the first."""
STILL = 1e-20
"""Below this frequency nothing is rotated at any position."""


class Rotary(MovableModule):
    """Wraps a family's own rotary module so that its frequencies stay in fp32."""

    wraps_rotary = True
    carries_positions = False
    """Whether the angles carry their positions as an attribute, for attention layers that get no position ids."""

    def __init__(self, inner: nn.Module, carries_positions: bool = False):
        super().__init__()
        self.inner, self.carries_positions = inner, carries_positions
        self._keep_from_initialization()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        angles = self.inner(*args, **kwargs)
        if self.carries_positions:
            positions = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
            first: Any = angles if isinstance(angles, Tensor) else angles[0]
            first.posenc_positions = positions
        return angles

    def on_move(self, move: Callable[[], object]) -> None:
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
    """A rotary module for the layers of one part of a plan, in addition to the model's own."""

    of_plan = True


@contextmanager
def hush_transformers(*other: str) -> Iterator[None]:
    """Suppress the warnings of transformers about the `rope_type` of sealed configs, about keys that only vLLM reads,
    and those that contain one of `other`. They need no action."""

    def is_useful(record: logging.LogRecord) -> bool:
        said = record.getMessage()
        theirs = "Unrecognized keys" in said and all(name in said for name in MSCALES)
        return not theirs and all(part not in said for part in (f"'rope_type'={SEALED!r}", *other))

    logger = logging.getLogger("transformers.modeling_rope_utils")
    logger.addFilter(is_useful)
    try:
        yield
    finally:
        logger.removeFilter(is_useful)
