"""Attention layers that read `rope_parameters` by themselves when they are built.

DeepSeek and similar models put a temperature into their scaling there. A patched layer must hold the values that a
layer built from the patched config would hold. To know these values, layers are built and compared.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..errors import UnsupportedCell
from ..families import Stack
from ..families.places import FREQUENCIES
from .edits import MISSING, Edit, Swap

PASSED_ON = "rope_parameters"
"""An attribute that holds the parameters themselves. It is replaced, not compared."""
PLAIN = (bool, int, float, str, tuple, list, dict, type(None))
Values = dict[tuple[str, str], Any]
"""Values by the path of a module within a layer and the name of its attribute."""
Changes = list[tuple[Any, Values]]
"""Layers, each with the values that change."""


def values_of(layer: nn.Module) -> Values:
    """The plain values that a layer holds in attributes, without those of rotary modules inside it."""
    return {
        (path, name): value
        for path, module in layer.named_modules()
        if not _is_rotary(module)
        for name, value in vars(module).items()
        if isinstance(value, PLAIN) and not name.startswith(("_", "posenc")) and name not in (PASSED_ON, "training")
    }


def _is_rotary(module: nn.Module) -> bool:
    buffers = [name for name, _ in module.named_buffers(recurse=False)]
    return any(map(FREQUENCIES.fullmatch, buffers)) or getattr(type(module), "wraps_rotary", False)


def built_values(own: Any, config: Any) -> Values | None:
    """The values that a layer of this class holds when it is built from a config; None if it cannot be built.

    It is built on the meta device, where weights take no memory and hardly any time.
    """
    arguments = {"config": config}
    for name in list(inspect.signature(type(own).__init__).parameters)[1:]:
        if name not in ("config", "device") and hasattr(own, name):
            arguments[name] = getattr(own, name)
    try:
        with torch.device("meta"):
            return values_of(type(own)(**arguments))
    except Exception:  # a class may need more than a config
        return None


def changes_between(stack: Stack, before: Any, after: Any) -> Changes:
    """The layers of a stack that hold other values when they are built from another config, with the new values.

    One layer of each kind is built first, and the others only if that one changes: in most families none does.
    """
    found: Changes = []
    for layers in _kinds(stack):
        first = changed_values(layers[0], before, after)
        if first:
            found += [(layers[0], first), *((layer, changed_values(layer, before, after)) for layer in layers[1:])]
    return found


def _kinds(stack: Stack) -> list[list[Any]]:
    """The layers that rotate, grouped by class and type."""
    types, kinds = getattr(stack.config, "layer_types", None) or [], dict[Any, list[Any]]()
    for layer in (*stack.attentions, *stack.unreached):
        index = getattr(layer, "layer_idx", None)
        kind = types[index] if isinstance(index, int) and index < len(types) else ""
        kinds.setdefault((type(layer), kind), []).append(layer)
    return list(kinds.values())


def changed_values(own: Any, before: Any, after: Any) -> Values:
    """The values that differ when a layer is built from another config."""
    old, new = built_values(own, before), built_values(own, after)
    if old is None:
        return {}
    if new is None:
        raise UnsupportedCell(f"{type(own).__name__} cannot be built from the rope_parameters that this scheme means.")
    return {key: new.get(key, MISSING) for key in {*old, *new} if old.get(key, MISSING) != new.get(key, MISSING)}


def layer_edits(stack: Stack, changes: Changes, after: Any) -> list[Edit]:
    """Gives the layers of a stack the values that layers built from this config hold."""
    edits: list[Edit] = []
    for layer, values in changes:
        live, built = values_of(layer), built_values(layer, stack.config) or {}
        for key, value in values.items():
            if live.get(key, MISSING) != built.get(key, MISSING):
                raise UnsupportedCell(
                    f"{type(layer).__name__} takes {key[1]!r} from config.rope_parameters, which mean "
                    f"{built.get(key)!r}, and the live one is {live.get(key)!r}: it was changed by hand. Load the "
                    "model anew."
                )
            edits.append(Swap(layer.get_submodule(key[0]), key[1], value))
    for layer in (*stack.attentions, *stack.unreached):
        if isinstance(vars(layer).get(PASSED_ON), dict):
            edits.append(Swap(layer, PASSED_ON, after.rope_parameters))
    return edits


def first_change(changes: Changes) -> str:
    """The first change, in words."""
    layer, values = changes[0]
    (path, name), value = next(iter(values.items()))
    return f"{type(layer.get_submodule(path)).__name__} would have {name}={value!r}"


def layer_faults(stack: Stack, config: Any, others: Sequence[Any]) -> list[str]:
    """Where live layers do not hold the values that layers built from this config hold.

    `others`: the same config with other rope parameters. Only values that differ between these configs are compared,
    since only they are read from the parameters.
    """
    faults = []
    for layers in _kinds(stack):
        first, *rest = [built_values(layers[0], one) for one in (config, *others)]
        if first is None:
            continue
        changed = {key for one in rest if one is not None for key in first if one.get(key) != first[key]}
        read = [key for key in first if key in changed]
        for layer in layers if read else []:
            live, built = values_of(layer), built_values(layer, config) or {}
            faults += [
                f"{key[1]} of {type(layer).__name__} is {live[key]!r}, and config.rope_parameters mean {built[key]!r}"
                for key in read
                if key in live and live[key] != built.get(key, live[key])
            ]
    return faults
