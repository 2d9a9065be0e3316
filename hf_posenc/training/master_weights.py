"""Master weights: trained parameters in fp32, whatever precision the model computes in.

AdamW at 2e-5 moves a weight of 1 by less than bf16 can represent, so nothing would be learned, silently. Trained
parameters are therefore held in fp32, where small updates add up. Layers read them rounded, which is also how they are
saved at the end. Frozen weights stay as they are.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..compat.pytorch import parameter_of


def keep_master_weights(model: nn.Module) -> None:
    """Convert trained parameters to fp32. Names, ties and forwards stay: a module's attribute is the rounded value.

    The `dtype` of the model stays too, which transformers reads from the first parameter.
    """
    low: list[tuple[Any, dict[str, torch.dtype]]] = [(m, names) for m in model.modules() if (names := _low(m))]
    said: list[tuple[Any, torch.dtype]] = [(m, m.dtype) for m in model.modules() if isinstance(m, PreTrainedModel)]
    if not low:
        return
    for module, names in low:  # after the search above, since two modules may share a parameter
        for name in names:
            parameter: Any = parameter_of(module, name)
            parameter.data = parameter.data.float()
        kind: Any = type(module)
        module.__class__ = _rounding(kind, tuple(names.items()))
    for module, dtype in said:
        kind = type(module)
        module.__class__ = _saying(kind, dtype)


def _low(module: nn.Module) -> dict[str, torch.dtype]:
    own = module.named_parameters(recurse=False, remove_duplicate=False)
    return {name: p.dtype for name, p in own if p.requires_grad and p.is_floating_point() and p.dtype.itemsize < 4}


@cache
def _saying(cls: Any, dtype: torch.dtype) -> type:
    return _subclass_with(cls, {"dtype": property(lambda self: dtype)})


@cache
def _rounding(cls: Any, dtypes: tuple[tuple[str, torch.dtype], ...]) -> type:
    def reads(name: str, dtype: torch.dtype) -> property:
        def read(self: Any) -> Tensor:
            held: Any = parameter_of(self, name)
            return held.to(dtype)

        return property(read)

    return _subclass_with(
        cls, {**{name: reads(name, dtype) for name, dtype in dtypes}, "posenc_rounded": dict(dtypes)}
    )


def _subclass_with(cls: type, more: dict[str, Any]) -> type:
    """A subclass with the same name, which transformers writes into configs."""
    return type(cls.__name__, (cls,), {**more, "__module__": cls.__module__, "__qualname__": cls.__qualname__})


def master(module: nn.Module, name: str) -> Tensor | None:
    """The parameter itself, not the rounded value."""
    return parameter_of(module, name)


def rounded_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """The dtypes in which parameters with master weights are read and saved, by name."""
    found: dict[str, torch.dtype] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, dtype in getattr(module, "posenc_rounded", {}).items():
            found[f"{prefix}.{name}".lstrip(".")] = dtype
    return found


def rounded_state(model: nn.Module, state: dict[str, Tensor] | None) -> dict[str, Tensor]:
    """The state of a model as it is saved, rounded. Tied tensors stay tied."""
    dtypes = rounded_dtypes(model)
    made: dict[tuple[int, torch.Size], Tensor] = {}
    found = {}
    for name, value in (model.state_dict() if state is None else state).items():
        key = (value.data_ptr(), value.shape)
        if name in dtypes and key not in made:
            made[key] = value.to(dtypes[name])
        found[name] = made[key] if name in dtypes else value
    return found
