"""Keeps position buffers and parameters in fp32 when a model is cast."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ..compat.pytorch import MovableModule


def apply_but_keep_fp32(module: nn.Module, apply: Callable[[], object], cast: tuple[str, ...] = ()) -> None:
    """Run `apply`, which moves and casts a module, and then restore its fp32 buffers and parameters on the new device.

    Those named in `cast` stay cast. bfloat16 has only 1,409 numbers below 131,072, and a frequency rounded to it gives
    angles that are off by radians at a large position.
    """
    buffers = dict(module.named_buffers(recurse=False))
    trained = {name: p.data for name, p in module.named_parameters(recurse=False)}
    apply()
    for name, buffer in buffers.items():
        moved = getattr(module, name)
        if buffer.dtype == torch.float32 and moved.dtype != torch.float32 and name not in cast:
            setattr(module, name, buffer.to(moved.device))
    for name, data in trained.items():
        parameter = getattr(module, name)
        if data.dtype == torch.float32 and parameter.dtype != torch.float32 and name not in cast:
            parameter.data = data.to(parameter.device)
            if parameter.grad is not None:
                parameter.grad = parameter.grad.float()


class Fp32Buffers(MovableModule):
    """A module whose own fp32 buffers and parameters follow the model's device but not its dtype."""

    follows_dtype: tuple[str, ...] = ()
    """The names of buffers and parameters that are cast with the model after all."""

    def on_move(self, move: Callable[[], object]) -> None:
        apply_but_keep_fp32(self, move, self.follows_dtype)


def fp32_names(model: nn.Module) -> set[str]:
    """The names of a model's parameters and buffers that stay in fp32 when it is cast."""
    found = set()
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Fp32Buffers):
            own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            found |= {f"{path}.{name}".lstrip(".") for name, _ in own if name not in module.follows_dtype}
    return found
