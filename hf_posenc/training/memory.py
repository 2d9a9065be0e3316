"""Less memory for long rows: recompute activations except those of attention, and run MLPs in parts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..compat.kernels import KernelMode, detach_all
from ..errors import PosencError
from .settings import TrainSettings

KEPT = ("scaled_dot_product", "flash_attn")
"""Kernels whose output is kept: attention takes quadratic time, but its output is small."""
MLPS = ("mlp", "feed_forward", "ffn")
"""Names of MLPs in layers."""


def recompute(model: Any, asked: TrainSettings) -> None:
    """Recompute the layers of a model in the backward pass."""
    given: dict[str, Any] = {"use_reentrant": False}
    if not asked.recompute_attention:
        given["context_fn"] = keep_attention_contexts
    more: dict[str, Any] = {"offload": True} if asked.offload else {}
    try:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=given, **more)
    except TypeError:
        raise PosencError("train.offload needs a newer transformers: pip install -U transformers.") from None
    if asked.mlp_tokens is not None:
        read_in_parts(model, asked.mlp_tokens)


def keep_attention_contexts() -> tuple[Keep, GiveBack]:
    """The contexts of a layer's forward and of its recomputation.

    torch's own contexts need every kernel to run again in the same order, but layers share masks.
    """
    kept: list[Any] = []
    return Keep(kept), GiveBack(kept)


def is_attention(kernel: str) -> bool:
    return any(part in kernel for part in KEPT) and "backward" not in kernel


class Keep(KernelMode):
    """Keeps the outputs of attention kernels."""

    def __init__(self, kept: list[Any]):
        super().__init__()
        self.kept = kept

    def kernel(self, name: str, args: Any, run: Callable[[], Any]) -> Any:
        given = run()
        if is_attention(name):
            self.kept.append(((name, shapes(args)), detach_all(given)))
        return given


class GiveBack(KernelMode):
    """Returns the kept outputs in the same order, instead of computing them again."""

    def __init__(self, kept: list[Any]):
        super().__init__()
        self.kept, self.next = kept, 0

    def __enter__(self) -> Any:
        self.next = 0
        return super().__enter__()

    def kernel(self, name: str, args: Any, run: Callable[[], Any]) -> Any:
        if not is_attention(name):
            return run()
        asked, given = self.kept[self.next] if self.next < len(self.kept) else (None, None)
        if asked != (name, shapes(args)):
            raise PosencError(
                "A layer called attention differently when it was recomputed. Recompute attention too "
                "(train.recompute_attention: true)."
            )
        self.next += 1
        return detach_all(given)


def shapes(args: Any) -> list[torch.Size]:
    return [arg.shape for arg in args if isinstance(arg, Tensor)]


def read_in_parts(model: Any, size: int) -> None:
    """Run every MLP on `size` tokens at a time."""
    for module in plain_mlps(model):
        module.forward = partial(run_in_parts, module.forward, size)


def plain_mlps(model: Any) -> list[Any]:
    """The MLPs of a model, which read each token by itself."""
    found = [
        module for name, module in model.named_modules() if name.rpartition(".")[2] in MLPS and is_per_token(module)
    ]
    if not found:
        raise PosencError(
            f"train.mlp_tokens: no plain MLP was found in this model (looked for {', '.join(MLPS)}). Leave it out."
        )
    return found


def is_per_token(module: nn.Module) -> bool:
    """Whether a module reads each token by itself and returns one tensor, unlike routed experts."""
    return not any("moe" in type(part).__name__.lower() or "router" in n for n, part in module.named_modules())


def run_in_parts(forward: Any, size: int, hidden: Tensor) -> Tensor:
    if not torch.is_grad_enabled() or hidden.dim() != 3 or hidden.shape[1] <= size:
        whole: Tensor = forward(hidden)
        return whole
    return torch.cat([checkpoint(forward, part, use_reentrant=False) for part in hidden.split(size, 1)], 1)
