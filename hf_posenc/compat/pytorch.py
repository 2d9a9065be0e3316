"""torch: the attention kernel for CPUs, hooks, and base classes for modules that act when cast, saved or loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..errors import PosencError

KERNEL = "_scaled_dot_product_flash_attention_for_cpu"


def cpu_attention(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scaling: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """torch's attention on a CPU, with the log-sum-exp of the scores of each query, (batch, heads, queries).

    The public function does not return the log-sum-exp, and takes either a mask or `causal`; the kernel behind it
    takes both. Call it only with the dtypes in `CPU_ATTENTION`: otherwise the kernel may be missing.
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
    """The gradients of queries, keys and values from that of the output.

    If these keys are only some of those that the queries see, `output` and `sums` must be those over all keys. The
    result is then what these keys contribute.
    """
    kernel = getattr(torch.ops.aten, KERNEL + "_backward")
    of_query, of_key, of_value = kernel(gradient, query, key, value, output, sums, 0.0, causal, scale=scaling)
    return of_query, of_key, of_value


def _is_right(dtype: torch.dtype) -> bool:
    """Whether the kernel exists and gives the same results as plain arithmetic on a small example."""
    numbers = torch.linspace(-1.0, 1.0, 2 * 3 * 4, dtype=torch.float32, device="cpu").reshape(2, 1, 3, 4).to(dtype)
    mask = torch.tensor([0.5, -1.0, 2.0], device="cpu").to(dtype).expand(2, 1, 3, 3)
    near = 2e-2 if dtype.itemsize < 4 else 1e-5
    try:
        errors = [
            *(_output_error(numbers, causal, added) for added, causal in ((None, False), (None, True), (mask, True))),
            *(_gradient_error(numbers, causal) for causal in (False, True)),
        ]
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return False
    return all(error < near for error in errors)


def _output_error(numbers: Tensor, causal: bool, mask: Tensor | None) -> float:
    """The largest error of outputs and sums."""
    query, key, value = numbers, numbers.flip(2), numbers.flip(3)
    found = cpu_attention(query, key, value, causal=causal, scaling=0.7, mask=mask)
    scores = _scores(query, key, causal) + (0.0 if mask is None else mask.float())
    return _largest_error(found, (scores.softmax(-1) @ value.float(), scores.logsumexp(-1)))


def _gradient_error(numbers: Tensor, causal: bool) -> float:
    """The largest error of the gradients, where outputs and sums are those over more keys than are given."""
    exact = torch.promote_types(numbers.dtype, torch.float32)
    query, key, value, gradient, output = (numbers, *(numbers.flip(axis) for axis in (2, 3, 0, 1)))
    scores = _scores(query, key, causal)
    sums = scores.logsumexp(-1) + 0.5
    whole = (output, sums.to(exact))
    found = cpu_attention_gradients(gradient, query, key, value, *whole, causal=causal, scaling=0.7)
    query, key, value, gradient, output = (x.float() for x in (query, key, value, gradient, output))
    weights = (scores - sums[..., None]).exp()
    of_scores = weights * (gradient @ value.mT - (output * gradient).sum(-1, keepdim=True)) * 0.7
    return _largest_error(found, (of_scores @ key, of_scores.mT @ query, weights.mT @ gradient))


def _scores(query: Tensor, key: Tensor, causal: bool) -> Tensor:
    scores = query.float() @ key.float().mT * 0.7
    later = torch.ones(scores.shape[2:], dtype=torch.bool, device="cpu").triu(1)
    return scores.masked_fill(later, float("-inf")) if causal else scores


def _largest_error(found: Sequence[Tensor], meant: Sequence[Tensor]) -> float:
    return max(float((one.float() - other).abs().max()) for one, other in zip(found, meant, strict=True))


def find_right_dtypes() -> tuple[torch.dtype, ...]:
    return tuple(filter(_is_right, (torch.float32, torch.float64, torch.bfloat16, torch.float16)))


CPU_ATTENTION = find_right_dtypes()
"""The dtypes in which `cpu_attention` was found to be right. Tested on import, as a compiler could not trace it."""


@contextmanager
def usual_defaults() -> Iterator[None]:
    """What is made here is in fp32 and on the CPU, whatever `torch.set_default_dtype` and `torch.device` say.

    Frequencies rounded to bfloat16 are other frequencies.
    """
    dtype = torch.get_default_dtype()
    try:
        if dtype != torch.float32:
            torch.set_default_dtype(torch.float32)
        with torch.device("cpu"):
            yield
    finally:
        if dtype != torch.float32:
            torch.set_default_dtype(dtype)


def has_pre_hook(module: Any, function: Callable[..., Any], before: str = "forward") -> bool:
    """Whether this function is a pre-hook of a module. torch has no public way to list hooks."""
    return function in _hooks(module, before).values()


def drop_pre_hook(module: Any, function: Callable[..., Any], before: str = "forward") -> None:
    """Remove this function from the pre-hooks of a module, without the handle that registering it returned."""
    hooks = _hooks(module, before)
    for key in [key for key, hook in hooks.items() if hook is function]:
        hooks.pop(key, None)
        module._forward_pre_hooks_with_kwargs.pop(key, None)


def _hooks(module: Any, before: str) -> dict[int, Any]:
    """The functions that run before a module's forward, or before its state dict is built."""
    found: dict[int, Any] = module._forward_pre_hooks if before == "forward" else module._state_dict_pre_hooks
    return found


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a backward pass whose own gradient is unknown: raises where one is asked for (`create_graph=True`).

    torch's decorator of this name marks a graph that is walked as a whole; `torch.autograd.grad` walks only what leads
    to the tensors that it is given, and takes what is missing for zero.
    """

    @wraps(backward)
    def checked(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise PosencError(
                "create_graph=True asks for gradients of gradients, which this package's fast attention and loss do "
                "not have. A patched model has them with model.set_attn_implementation('hf_posenc_eager')."
            )
        return backward(ctx, *gradients)

    return checked


def unwrap_compiled(model: Any) -> Any:
    """The model inside the wrapper of `torch.compile`; any other model unchanged."""
    return getattr(model, "_orig_mod", model)


def is_compiled(model: Any) -> bool:
    return hasattr(model, "_orig_mod")


def is_traced() -> bool:
    """Whether torch.jit writes down what is done."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined]


def assert_later(holds: Tensor, message: str) -> None:
    """Raise when the device finds that `holds` is false. A compiled graph cannot stop to look at the value."""
    torch._assert_async(holds, message)


def changes_of(tensor: Tensor) -> int:
    """How many times a tensor was changed in place."""
    return tensor._version


def parameter_of(module: nn.Module, name: str) -> nn.Parameter | None:
    """A parameter as the module stores it, even if its class has a property of that name."""
    return module._parameters[name]


class Uncalled(nn.Module):
    """A module that may hold numbers alone."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """torch's own stand-in for a forward cannot be pickled once accelerate has replaced it."""
        raise NotImplementedError(f"{type(self).__name__} computes nothing")


class MovableModule(Uncalled):
    """A module with a method that runs when it is cast or moved, alone or as part of a model."""

    def on_move(self, move: Callable[[], object]) -> None:
        """Runs instead of `move`, which does the requested cast or move and must be called."""
        move()

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        parent = super()._apply
        self.on_move(lambda: parent(fn, recurse))
        return self


class SavableModule(Uncalled):
    """A module that can change its entries in state dicts."""

    def after_saving(self, state: dict[str, Any], prefix: str) -> None:
        """Change the entries of this module that were just saved; their names begin with `prefix`."""

    def before_loading(self, state: dict[str, Any], prefix: str) -> None:
        """Change the entries that this module is about to load."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        self.after_saving(destination, prefix)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.before_loading(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)
