"""A few numbers of a base model's weights, by which an adapter knows the model that it was trained on.

An adapter on another version of its base, or on a base into which it was merged already, makes another model, and no
config shows that.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..core.tables import ReplacementTable
from ..errors import PosencError

SAMPLE, TENSORS = 64, 24
"""How many numbers of each tensor, and how many tensors: one for each place in a layer."""
APART = 0.25
"""The part of a sample that may differ: a number that was rounded twice may come out differently."""
GENTLE = ("gaussian", "eva", "orthogonal")
"""The names of ways to start an adapter that do not change the weights below it."""
KINDS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

Fingerprint = dict[str, dict[str, Any]]
"""By name of a weight: its shape, its dtype and some of its numbers."""


def fingerprint(model: nn.Module) -> Fingerprint:
    """The fingerprint of a base model, with or without PEFT adapters. Quantised and sharded weights are left out."""
    chosen: dict[str, tuple[bool, str, Tensor]] = {}
    for name, tensor, adapted in base_weights(model):
        place = re.sub(r"\d+", "#", name)
        if place not in chosen or (adapted and not chosen[place][0]):
            chosen[place] = (adapted, name, tensor)
    first = sorted(chosen.values(), key=lambda one: not one[0])[:TENSORS]
    return {name: _numbers_of(tensor) for _, name, tensor in first}


def fingerprint_below(model: nn.Module) -> Fingerprint:
    """The fingerprint of all that is below an adapter, what its scheme has learned included."""
    return {**fingerprint(model), **{name: _numbers_of(tensor) for name, tensor in scheme_weights(model).items()}}


def _numbers_of(tensor: Tensor) -> dict[str, Any]:
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).partition(".")[2], "values": _sample(tensor)}


def base_weights(model: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """The weights of a base model that can be compared: plain name, tensor, and whether an adapter is on it.

    Biases and parameters of a scheme are left out, since they may be trained together with the adapter.
    """
    configs: dict[str, Any] = getattr(model, "peft_config", {})
    starts = [getattr(config, "init_lora_weights", True) for config in configs.values()]
    altered = any(isinstance(start, str) and start not in GENTLE for start in starts)
    modules = dict(model.named_modules())
    for full, parameter in model.named_parameters():
        parts = full.split(".")
        adapted = "base_layer" in parts
        owner = modules[".".join(parts[: parts.index("base_layer")] if adapted else parts[:-1])]
        own = (
            set(parts) & set(configs)
            or "posenc_" in full
            or parts[-1] == "bias"
            or isinstance(owner, ReplacementTable)
        )
        if own or (adapted and (altered or getattr(owner, "merged", False))) or not _is_comparable(parameter):
            continue
        yield ".".join(p for p in parts if p not in ("base_layer", "original_module")), parameter.detach(), adapted


def scheme_weights(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that a scheme brought and an adapter does not save, by name. They belong to the base model."""
    configs: dict[str, Any] = getattr(model, "peft_config", {})
    if any(getattr(config, "bias", "none") != "none" for config in configs.values()):  # PEFT goes by names
        return {}
    found = {name: p.detach() for name, p in model.named_parameters() if "posenc_" in name and _is_comparable(p)}
    return {name: p for name, p in found.items() if not {"original_module", *configs} & {*name.split(".")}}


def refuse_other_weights(model: nn.Module, seen: Any, path: str) -> None:
    """Raise where a base model has other weights than the adapter was trained on."""
    live = {name: tensor for name, tensor, _ in base_weights(model)} | scheme_weights(model)
    for name, (shape, dtype, values) in read_fingerprint(seen).items():
        if name not in live or live[name].shape != shape:  # it is quantised or has grown, and cannot be compared
            continue
        found = _pick_numbers(live[name])
        kinds = _dtypes_to_compare(dtype, live[name].dtype, found)
        if min(_part_that_differs(found, values, kind) for kind in kinds) > APART:
            raise PosencError(
                f"The adapter in {path} was trained on other weights than this base model has ({name}, for one): it "
                "is another version of it, or has an adapter merged into it already. Pass the right one as base=. If "
                "this one is meant, take 'base' out of the adapter's posenc.json."
            )


def read_fingerprint(data: Any) -> dict[str, tuple[torch.Size, torch.dtype, Tensor]]:
    """Read a fingerprint from a file strictly."""
    try:
        return {
            name: (
                torch.Size(one["shape"]),
                KINDS[one["dtype"]],
                torch.frombuffer(bytearray(base64.b64decode(one["values"], validate=True)), dtype=torch.float32),
            )
            for name, one in data.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise PosencError(
            f"The weights of a base model that posenc.json speaks of make no sense: {error!r}."
        ) from None


def _dtypes_to_compare(trained: torch.dtype, live: torch.dtype, found: Tensor) -> set[torch.dtype]:
    """The coarser of two dtypes, and those that the live numbers may have been rounded to."""
    rounded = {kind for kind in KINDS.values() if torch.equal(found.to(kind).float(), found)}
    return {max(trained, live, key=lambda kind: torch.finfo(kind).eps), *rounded}


def _part_that_differs(one: Tensor, other: Tensor, kind: torch.dtype) -> float:
    return float((one.to(kind) != other.to(kind)).float().mean())


def _is_comparable(tensor: Tensor) -> bool:
    """Whether a weight is whole, and made of plain numbers that can be compared."""
    whole = type(tensor.data) is Tensor and tensor.device.type != "meta" and tensor.numel() > 0
    return whole and tensor.dtype in KINDS.values()


def _pick_numbers(tensor: Tensor) -> Tensor:
    """Numbers from all over a tensor."""
    tensor = tensor.reshape(1) if tensor.ndim == 0 else tensor
    count = min(SAMPLE, tensor.numel())
    where = torch.arange(count, device=tensor.device) * (tensor.numel() - 1) // max(count - 1, 1)
    return tensor.detach()[torch.unravel_index(where, tensor.shape)].float().cpu()


def _sample(tensor: Tensor) -> str:
    return base64.b64encode(_pick_numbers(tensor).numpy().astype("<f4").tobytes()).decode()
