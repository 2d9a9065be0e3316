"""Parts of a live model found by what they do, not by what they are called."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from torch import nn

from ..compat.models import calls_interface, rotates

CROSS = re.compile(r"cross|encoder_attn|encdec", re.IGNORECASE)
"""In the path of attention layers that look at another text, where positions of this one mean nothing."""
FREQUENCIES = re.compile(r"(?:(?P<layer_type>\w+)_)?inv_freq")
"""The buffers of a rotary module: one, or one for each type of layer."""


class Site(NamedTuple):
    """A module that was found in a model, and the place that it can be replaced at."""

    owner: Any
    name: str
    module: Any
    """None where there could be one and is not."""


class RotarySite(NamedTuple):
    """A rotary module, and the place that it can be replaced at."""

    owner: Any
    name: str
    module: Any
    """What stands there: the family's own module, or a patch's wrapper around one."""
    own: Any
    """The family's own module."""
    buffers: dict[str, str]
    """Its frequency buffers by layer type; "" where all layers share one."""


@dataclass
class Parts:
    """What one walk over a model finds."""

    attentions: list[Any] = field(default_factory=list)
    """Self-attention behind transformers' attention interface."""
    crosses: list[Any] = field(default_factory=list)
    """The same, of attention to something else."""
    rotaries: list[RotarySite] = field(default_factory=list)
    """The rotary modules that read `rope_parameters`."""
    rotating: list[Any] = field(default_factory=list)
    """The modules that apply rotary angles to something in their forward."""
    lists: list[nn.ModuleList] = field(default_factory=list)


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


def frequency_buffers(module: nn.Module) -> dict[str, str]:
    """The frequency buffers of a rotary module by layer type; "" where all layers share one."""
    found = {}
    for name, _ in module.named_buffers(recurse=False):
        match = FREQUENCIES.fullmatch(name)
        if match and not (match["layer_type"] or "").endswith("original"):
            found[match["layer_type"] or ""] = name
    return found


def parts_of(root: nn.Module, kind: str) -> Parts:
    """What there is in a model, of the parts whose config is of this model type."""
    found, wrapped = Parts(), set()
    for path, module in root.named_modules():
        cls: Any = type(module)
        own: Any = module.inner if getattr(cls, "wraps_rotary", False) else module
        config = getattr(own, "config", None)
        config_kind = getattr(config, "model_type", None)
        if getattr(cls, "of_plan", False):
            wrapped |= {id(module), id(own)}
        if isinstance(module, nn.ModuleList):
            found.lists.append(module)
        if rotates(cls):
            found.rotating.append(module)
        if calls_interface(cls) and config_kind in (kind, None):
            other = CROSS.search(path) or CROSS.search(cls.__name__)
            (found.crosses if other else found.attentions).append(module)
        buffers = {} if id(module) in wrapped else frequency_buffers(own)
        if buffers:
            wrapped.add(id(own))
            if config_kind == kind and hasattr(config, "rope_parameters"):
                owner, _, name = path.rpartition(".")
                found.rotaries.append(RotarySite(root.get_submodule(owner), name, module, own, buffers))
    return found


def held_in(root: nn.Module, names: tuple[str, ...]) -> list[Site]:
    """The modules that any module holds under one of these names."""
    held = ((owner, name, getattr(owner, name, None)) for owner in root.modules() for name in names)
    return [Site(*site) for site in held if site[2] is not None]


def layers_with(root: nn.Module, argument: str) -> list[nn.Module]:
    """The innermost modules whose forward takes this argument."""
    found = [(path, m) for path, m in root.named_modules() if argument in argument_names(m)]
    return [m for path, m in found if not any(other.startswith(path + ".") for other, _ in found)]
