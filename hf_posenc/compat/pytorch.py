"""torch: the CPU's attention kernel, hooks, and what happens to modules when they are cast, saved or loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

KERNEL = "_scaled_dot_product_flash_attention_for_cpu"


def cpu_attention(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scaling: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """torch's own attention on a CPU, and the logarithm of the sum behind each softmax, (batch, heads, queries).

    The public function gives no sums, and takes a mask or `causal`; the kernel behind it takes both. Only for dtypes
    in `CPU_ATTENTION`: in others, or in another release of torch, it may be missing.
    """
    kernel = getattr(torch.ops.aten, KERNEL)
    output, sums = kernel(query, key, value, 0.0, causal, attn_mask=mask, scale=scaling)
    return output, sums


def _proved(dtype: torch.dtype) -> bool:
    """Whether that kernel exists and does what is said of it, on numbers that plain arithmetic can check."""
    numbers = torch.linspace(-1.0, 1.0, 2 * 3 * 4, dtype=torch.float32, device="cpu").reshape(2, 1, 3, 4).to(dtype)
    query, key, value = numbers, numbers.flip(2), numbers.flip(3)
    mask = torch.tensor([0.5, -1.0, 2.0], device="cpu").to(dtype).expand(2, 1, 3, 3)
    scores = query.float() @ key.float().transpose(2, 3) * 0.7
    try:
        for added, causal in ((None, False), (None, True), (mask, True)):
            output, sums = cpu_attention(query, key, value, causal=causal, scaling=0.7, mask=added)
            seen = scores if added is None else scores + added.float()
            if causal:
                later = torch.ones(3, 3, dtype=torch.bool, device="cpu").triu(1)
                seen = seen.masked_fill(later, float("-inf"))
            error = max(
                float((output.float() - seen.softmax(-1) @ value.float()).abs().max()),
                float((sums.float() - seen.logsumexp(-1)).abs().max()),
            )
            if not error < (2e-2 if dtype.itemsize < 4 else 1e-5):
                return False
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return False
    return True


def proved_dtypes() -> tuple[torch.dtype, ...]:
    return tuple(filter(_proved, (torch.float32, torch.float64, torch.bfloat16, torch.float16)))


CPU_ATTENTION = proved_dtypes()
"""The dtypes that `cpu_attention` was seen to be right in. Not asked for at each call: a compiler could not follow."""


def has_pre_hook(module: nn.Module, hook: Callable[..., Any]) -> bool:
    """Whether this function runs before the forward of a module. torch lets hooks be added, but not looked at."""
    return hook in module._forward_pre_hooks.values()


def uncompiled(model: Any) -> Any:
    """The model inside what `torch.compile` gives; any other as it is."""
    return getattr(model, "_orig_mod", model)


def is_compiled(model: Any) -> bool:
    return hasattr(model, "_orig_mod")


def assert_later(holds: Tensor, message: str) -> None:
    """Raise once the device knows that this does not hold: a compiled graph cannot stop to look."""
    torch._assert_async(holds, message)


def changes_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place so far."""
    return tensor._version


def parameter_of(module: nn.Module, name: str) -> nn.Parameter | None:
    """A parameter as a module holds it, whatever its class gives out under that name."""
    return module._parameters[name]


class Moving(nn.Module):
    """A module that has a say whenever it is cast or moved, alone or with the model that it is a part of."""

    def moved(self, move: Callable[[], object]) -> None:
        """Runs in the place of `move`, which does what was asked for."""
        move()

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        parent = super()._apply
        self.moved(lambda: parent(fn, recurse))
        return self


class Stored(nn.Module):
    """A module that has a say in what state dicts hold of it."""

    def stored(self, state: dict[str, Any], prefix: str) -> None:
        """Change what was just saved of this module; `prefix` opens the names of its tensors."""

    def before_loading(self, state: dict[str, Any], prefix: str) -> None:
        """Change what this module is about to load."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        self.stored(destination, prefix)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.before_loading(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)
