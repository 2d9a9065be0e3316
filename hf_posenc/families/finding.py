"""Parts of a live model found by what they do, not by what they are called."""

from __future__ import annotations

import inspect
import re
from functools import cache
from typing import Any, NamedTuple

from torch import nn

from ..compat.models import calls_interface

CROSS = re.compile(r"cross|encoder_attn|encdec", re.IGNORECASE)
"""In the path of attention layers that look at another text, where positions of this one mean nothing."""
FREQUENCIES = re.compile(r"(?:(?P<layer_type>\w+)_)?inv_freq")
"""The buffers of a rotary module: one, or one for each type of layer."""


class Site(NamedTuple):
    """A module and the place that it can be replaced at."""

    owner: Any
    name: str

    @property
    def module(self) -> Any:
        return getattr(self.owner, self.name)


def site_at(root: nn.Module, path: str) -> Site:
    owner, _, name = path.rpartition(".")
    return Site(root.get_submodule(owner), name)


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


def unwrapped(module: Any) -> Any:
    """A family's own rotary module, also behind the wrapper of a patch."""
    return module.inner if getattr(type(module), "wraps_rotary", False) else module


def frequency_buffers(module: Any) -> dict[str, str]:
    """The frequency buffers of a rotary module by layer type; "" where all layers share one."""
    found = {}
    for name, _ in unwrapped(module).named_buffers(recurse=False):
        match = FREQUENCIES.fullmatch(name)
        if match and not (match["layer_type"] or "").endswith("original"):
            found[match["layer_type"] or ""] = name
    return found


def rotary_sites(root: nn.Module, kind: str) -> list[Site]:
    """The rotary modules that read `rope_parameters` of a config of this model type."""
    found, inner = [], set()
    for path, module in root.named_modules():
        config = getattr(module, "config", None)
        if id(module) in inner or not frequency_buffers(module):
            continue
        inner.add(id(unwrapped(module)))
        if getattr(config, "model_type", None) == kind and hasattr(config, "rope_parameters"):
            found.append(site_at(root, path))
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


def layer_list(root: nn.Module, length: int) -> nn.ModuleList | None:
    """The outermost list of as many modules as the config has layers."""
    lists = (m for m in root.modules() if isinstance(m, nn.ModuleList) and len(m) == length)
    return next(lists, None)
