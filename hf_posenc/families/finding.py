"""Parts of a live model found by what they do, not by what they are called."""

from __future__ import annotations

import inspect
import re
from functools import cache
from typing import Any, NamedTuple

from torch import nn

CROSS = re.compile(r"cross|encoder_attn|encdec", re.IGNORECASE)
"""In the path of attention layers that look at another text, where positions of this one mean nothing."""
ROTATES = re.compile(r"apply\w*rot", re.IGNORECASE)
"""In the names that a forward uses when it rotates channels."""
FREQUENCIES = re.compile(r"(?:(?P<layer_type>\w+)_)?inv_freq")
"""The buffers of a rotary module: one, or one for each type of layer."""


class Site(NamedTuple):
    """A module that was found in a model, and the place that it can be replaced at."""

    owner: Any
    name: str
    module: Any
    """None where there could be one and is not."""


class RotarySite(NamedTuple):
    """A rotary module, and its frequency buffers by layer type; "" where all layers share one."""

    owner: Any
    name: str
    module: Any
    buffers: dict[str, str]


def site_at(root: nn.Module, path: str) -> Site:
    path, _, name = path.rpartition(".")
    owner = root.get_submodule(path)
    return Site(owner, name, getattr(owner, name))


def module_at(root: Any, path: str) -> Any:
    """The submodule at a dotted path, or None."""
    for name in filter(None, path.split(".")):
        root = getattr(root, name, None)
        if root is None:
            return None
    return root


def argument_names(module: Any) -> tuple[str, ...]:
    """The arguments of a module's forward, in order."""
    cls: Any = type(module)
    return _argument_names(cls)


@cache
def _argument_names(cls: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(inspect.unwrap(cls.forward)).parameters)[1:]


@cache
def _names_used(cls: Any) -> tuple[str, ...]:
    """The global names that a class's forward uses."""
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    return () if code is None else code.co_names


def calls_interface(module: Any) -> bool:
    """Whether a module attends through transformers' attention interface."""
    cls: Any = type(module)
    return "ALL_ATTENTION_FUNCTIONS" in _names_used(cls)


def held_in(root: nn.Module, names: tuple[str, ...]) -> list[Site]:
    """The modules that any module holds under one of these names."""
    held = ((owner, name, getattr(owner, name, None)) for owner in root.modules() for name in names)
    return [Site(*site) for site in held if site[2] is not None]


def rotating_modules(root: nn.Module) -> list[nn.Module]:
    """The modules that apply rotary angles to something in their forward."""
    found = ((type(module), module) for module in root.modules())
    return [module for cls, module in found if _rotates(cls)]  # type: ignore[arg-type]


@cache
def _rotates(cls: Any) -> bool:
    return any(ROTATES.search(name) for name in _names_used(cls))


def own_rotary(module: Any) -> Any:
    """A family's own rotary module, also behind the wrapper of a patch."""
    return module.inner if getattr(type(module), "wraps_rotary", False) else module


def frequency_buffers(module: Any) -> dict[str, str]:
    """The frequency buffers of a rotary module by layer type; "" where all layers share one."""
    found = {}
    for name, _ in own_rotary(module).named_buffers(recurse=False):
        match = FREQUENCIES.fullmatch(name)
        if match and not (match["layer_type"] or "").endswith("original"):
            found[match["layer_type"] or ""] = name
    return found


def rotary_sites(root: nn.Module, kind: str) -> list[RotarySite]:
    """The rotary modules that read `rope_parameters` of a config of this model type."""
    found, inner = [], set()
    for path, module in root.named_modules():
        config = getattr(module, "config", None)
        buffers = {} if id(module) in inner else frequency_buffers(module)
        if not buffers:
            continue
        inner.add(id(own_rotary(module)))
        if getattr(config, "model_type", None) == kind and hasattr(config, "rope_parameters"):
            owner, _, name = path.rpartition(".")
            found.append(RotarySite(root.get_submodule(owner), name, module, buffers))
    return found


def attention_layers(root: nn.Module, kind: str) -> tuple[list[nn.Module], list[nn.Module]]:
    """The layers behind transformers' attention interface: self-attention, and attention to something else."""
    own: list[nn.Module] = []
    crosses: list[nn.Module] = []
    for path, module in root.named_modules():
        if calls_interface(module):
            other = CROSS.search(path) or CROSS.search(type(module).__name__)
            if getattr(getattr(module, "config", None), "model_type", kind) == kind:
                (crosses if other else own).append(module)
    return own, crosses


def layers_with(root: nn.Module, argument: str) -> list[nn.Module]:
    """The innermost modules whose forward takes this argument."""
    found = [(path, m) for path, m in root.named_modules() if argument in argument_names(m)]
    return [m for path, m in found if not any(other.startswith(path + ".") for other, _ in found)]


def first_layer(root: nn.Module, length: int | None) -> nn.Module | None:
    """The first of the outermost list of as many modules as the config has layers."""
    lists = (m for m in root.modules() if isinstance(m, nn.ModuleList) and len(m) == length)
    found = next(lists, None)
    return found[0] if found else None
