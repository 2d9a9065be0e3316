"""torch: the CPU's attention kernel, hooks, and what happens to modules when they are cast, saved or loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def cpu_attention_gradients(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    sums: Tensor,
    *,
    causal: bool,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values from that of the output. Where these keys are a part of those that the
    queries see, `output` and `sums` are those of all, and what is found is what this part adds."""
    kernel = getattr(torch.ops.aten, KERNEL + "_backward")
    of_query, of_key, of_value = kernel(gradient, query, key, value, output, sums, 0.0, causal, scale=scaling)
    return of_query, of_key, of_value


def _proved(dtype: torch.dtype) -> bool:
    """Whether that kernel exists and does what is said of it, on numbers that plain arithmetic can check."""
    numbers = torch.linspace(-1.0, 1.0, 2 * 3 * 4, dtype=torch.float32, device="cpu").reshape(2, 1, 3, 4).to(dtype)
    mask = torch.tensor([0.5, -1.0, 2.0], device="cpu").to(dtype).expand(2, 1, 3, 3)
    near = 2e-2 if dtype.itemsize < 4 else 1e-5
    try:
        errors = [
            *(_error(numbers, causal, added) for added, causal in ((None, False), (None, True), (mask, True))),
            *(_gradient_error(numbers, causal) for causal in (False, True)),
        ]
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return False
    return all(error < near for error in errors)


def _error(numbers: Tensor, causal: bool, mask: Tensor | None) -> float:
    """Of outputs and sums."""
    query, key, value = numbers, numbers.flip(2), numbers.flip(3)
    found = cpu_attention(query, key, value, causal=causal, scaling=0.7, mask=mask)
    scores = _scores(query, key, causal) + (0.0 if mask is None else mask.float())
    return _apart(found, (scores.softmax(-1) @ value.float(), scores.logsumexp(-1)))


def _gradient_error(numbers: Tensor, causal: bool) -> float:
    """Of what a part adds to the gradients; outputs and sums are said to be those of more keys."""
    exact = torch.promote_types(numbers.dtype, torch.float32)
    query, key, value, gradient, output = (numbers, *(numbers.flip(axis) for axis in (2, 3, 0, 1)))
    scores = _scores(query, key, causal)
    sums = scores.logsumexp(-1) + 0.5
    whole = (output, sums.to(exact))
    found = cpu_attention_gradients(gradient, query, key, value, *whole, causal=causal, scaling=0.7)
    query, key, value, gradient, output = (x.float() for x in (query, key, value, gradient, output))
    weights = (scores - sums[..., None]).exp()
    of_scores = weights * (gradient @ value.mT - (output * gradient).sum(-1, keepdim=True)) * 0.7
    return _apart(found, (of_scores @ key, of_scores.mT @ query, weights.mT @ gradient))


def _scores(query: Tensor, key: Tensor, causal: bool) -> Tensor:
    scores = query.float() @ key.float().mT * 0.7
    later = torch.ones(scores.shape[2:], dtype=torch.bool, device="cpu").triu(1)
    return scores.masked_fill(later, float("-inf")) if causal else scores


def _apart(found: Sequence[Tensor], meant: Sequence[Tensor]) -> float:
    return max(float((one.float() - other).abs().max()) for one, other in zip(found, meant, strict=True))


def proved_dtypes() -> tuple[torch.dtype, ...]:
    return tuple(filter(_proved, (torch.float32, torch.float64, torch.bfloat16, torch.float16)))


CPU_ATTENTION = proved_dtypes()
"""The dtypes that `cpu_attention` was seen to be right in. Not asked for at each call: a compiler could not follow."""


def has_pre_hook(module: Any, function: Callable[..., Any], before: str = "forward") -> bool:
    """Whether this function runs before the forward of a module. torch lets hooks be added, but not looked at."""
    return function in _hooks(module, before).values()


def drop_pre_hook(module: Any, function: Callable[..., Any], before: str = "forward") -> None:
    """Let this function run there no more, whoever holds the handle."""
    hooks = _hooks(module, before)
    for key in [key for key, hook in hooks.items() if hook is function]:
        hooks.pop(key, None)
        module._forward_pre_hooks_with_kwargs.pop(key, None)


def _hooks(module: Any, before: str) -> dict[int, Any]:
    """The functions that run before a module's forward, or before its state dict is made."""
    found: dict[int, Any] = module._forward_pre_hooks if before == "forward" else module._state_dict_pre_hooks
    return found


def uncompiled(model: Any) -> Any:
    """The model inside what `torch.compile` gives; any other as it is."""
    return getattr(model, "_orig_mod", model)


def is_compiled(model: Any) -> bool:
    return hasattr(model, "_orig_mod")


def is_traced() -> bool:
    """Whether torch.jit writes down what is done."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined]


def assert_later(holds: Tensor, message: str) -> None:
    """Raise once the device knows that this does not hold: a compiled graph cannot stop to look."""
    torch._assert_async(holds, message)


def changes_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place so far."""
    return tensor._version


def parameter_of(module: nn.Module, name: str) -> nn.Parameter | None:
    """A parameter as a module holds it, whatever its class gives out under that name."""
    return module._parameters[name]


class Uncalled(nn.Module):
    """A module that may hold numbers alone."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """torch's own stand-in for a forward cannot be pickled once accelerate has taken hold of it."""
        raise NotImplementedError(f"{type(self).__name__} computes nothing")


class Moving(Uncalled):
    """A module that has a say whenever it is cast or moved, alone or with the model that it is a part of."""

    def moved(self, move: Callable[[], object]) -> None:
        """Runs in the place of `move`, which does what was asked for."""
        move()

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        parent = super()._apply
        self.moved(lambda: parent(fn, recurse))
        return self


class Stored(Uncalled):
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
