"""Every place in one live model where positions enter. Parts are found by what they do, not by their names."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel, __version__

from ..compat.models import calls_interface, release, rotates
from ..errors import UnsupportedModel
from .base import FAMILIES, REFUSED, Family, family_of
from .config_checks import check_config
from .rotary import ROTARY

CROSS = re.compile(r"cross|encoder_attn|encdec", re.IGNORECASE)
"""In the path of attention layers that look at another text, where positions of this text mean nothing."""
FREQUENCIES = re.compile(r"(?:(?P<layer_type>\w+)(?<!original)_)?inv_freq")
"""The names of a rotary module's frequency buffers: there is one, or one for each type of layer."""


class Site(NamedTuple):
    """A module that was found in a model, and where it can be replaced."""

    owner: Any
    name: str
    module: Any
    """None where there could be a module and there is none."""


class RotarySite(NamedTuple):
    """A rotary module, and where it can be replaced."""

    owner: Any
    name: str
    module: Any
    """What stands there now: the family's own module, or a patch's wrapper around it."""
    own: Any
    """The family's own module."""
    buffers: dict[str, str]
    """The names of its frequency buffers by layer type; "" where all layers share one."""


@dataclass
class Parts:
    """What one walk over a model finds."""

    attentions: list[Any] = field(default_factory=list)
    """Layers of self-attention that go through transformers' attention interface."""
    crosses: list[Any] = field(default_factory=list)
    """Such layers that attend to another text."""
    rotaries: list[RotarySite] = field(default_factory=list)
    """The rotary modules that read `rope_parameters`."""
    rotators: list[Any] = field(default_factory=list)
    """The modules that rotate something by rotary angles in their forward."""
    lists: list[nn.ModuleList] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, eq=False)
class Stack:
    """Layers that run one after another: a decoder, an encoder, or a vision tower."""

    family: Family
    name: str
    root: Any
    """The model without its head, or its encoder or decoder."""
    config: Any
    """The config that describes its positions."""
    weight: Any
    """The module that turns the input into states. The device and dtype of its weight are those of the stack."""
    attentions: list[Any]
    """Layers of self-attention that go through transformers' attention interface."""
    crosses: list[nn.Module]
    rotaries: list[RotarySite]
    unreached: list[nn.Module]
    """Layers that rotate their input by themselves, and do not go through the attention interface."""
    table: Site | None
    offset: int
    """How many rows of the table come before the row of position 0."""
    embeddings: Any
    """The module that reads the table; None where a patch need not know it."""
    biased: list[nn.Module]
    """The layers that take the family's own position bias."""
    biases: list[Site]
    """The position biases that the model was built with and that it can run without."""
    causal: bool = False
    first_layer: nn.Module | None = None
    """None on vision models, and where no list has as many layers as the config says."""
    patch: tuple[int, ...] = ()
    """Height and width of a patch in pixels, on vision models."""
    grid: tuple[int, ...] = ()
    """Rows and columns of patches in an image of the size that the config names."""
    special: int = 0
    """How many tokens in attention come before the patches; they have no coordinates."""


@dataclass(frozen=True, eq=False)
class Group:
    """Layers of a stack that share one set of angles: all layers of the stack, or those of one type."""

    name: str
    stack: Stack
    layer_type: str
    """A name from `config.layer_types`; "" where the config has no types of layers."""
    attentions: list[Any]
    inv_freq: Tensor | None
    """The frequencies that the model had when its places were found; None on stacks without RoPE."""
    suffix: str = ""
    """The end of the names of its modules, where a plan has divided layers that share angles."""


@dataclass(frozen=True, eq=False)
class Places:
    """Where positions enter one live model."""

    family: Family
    model: PreTrainedModel
    base: Any
    model_config: Any
    config: Any
    """The config that describes positions: the model's own, or that of its text or vision part."""
    stacks: list[Stack]
    groups: list[Group]
    """Every group of layers that has its own angles, or could have."""
    strangers: list[Any]
    """Attention layers of the same config that are in no stack, such as those of a speech encoder."""
    has_rotary: bool
    has_table: bool
    has_bias: bool
    own_configs: Any = None
    """On a model that is about to be patched: the edit that gives it its own copies of its configs. The configs above
    are then those copies."""


def places(model: PreTrainedModel) -> Places:
    """Find every place in the live model. Where something is missing, the error says what was looked for."""
    check_config(model.config)
    kind = model.config.model_type
    if kind in REFUSED:
        raise UnsupportedModel(f"Models of type {kind!r} cannot be patched: {REFUSED[kind]}.")
    family, base = family_of(kind), model.base_model
    if family is not None and release() < family.since:
        raise UnsupportedModel(
            f"transformers {__version__} builds models of the {family.name!r} family in another way: to patch them, "
            f"you need {'.'.join(map(str, family.since))} or later. Upgrade it (pip install -U transformers)."
        )
    text = model.config.get_text_config().model_type
    parts = find_parts(base, text)
    if family is not None and (family.rotary or not parts.rotaries):
        stacks = _named_stacks(model, base, family, parts if text == kind else None)
    else:
        _refuse_unknown(model, parts.rotaries)
        family, root = ROTARY, _text_part(base, parts.rotaries)
        stacks = [_stack(family, "", root, parts if root is base else find_parts(root, text))]
    config = stacks[0].config
    if config.model_type != text:
        parts = find_parts(base, config.model_type)
    inside = {id(layer) for stack in stacks for layer in (*stack.attentions, *stack.crosses)}
    return Places(
        family=family,
        model=model,
        base=base,
        model_config=model.config,
        config=config,
        stacks=stacks,
        groups=[group for stack in stacks for group in _groups(stack)],
        strangers=[layer for layer in (*parts.attentions, *parts.crosses) if id(layer) not in inside],
        has_rotary=any([stack.rotaries for stack in stacks]),
        has_table=family.table is not None,
        has_bias=family.bias is not None,
    )


def _refuse_unknown(model: PreTrainedModel, sites: list[RotarySite]) -> None:
    """Raise where the family for all RoPE models cannot serve this model either."""
    kind = model.config.model_type
    if not sites:
        supported = "; ".join(f"{f.name}: {', '.join(f.model_types)}" for f in FAMILIES.values() if f.model_types)
        raise UnsupportedModel(
            f"Models of type {kind!r} are not supported. Looked for: a module that holds `inv_freq` and reads "
            f"`config.rope_parameters`, as nearly all RoPE models have, and found none. Types that are known by name: "
            f"{supported}. A family is a few lines of module paths: docs/extending.md says how to add one."
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModel(
            f"Models of type {kind!r} are not supported: they have an encoder and a decoder with RoPE, and the family "
            "for unknown RoPE models knows one stack of layers. A family that names both is a few lines: "
            "docs/extending.md says how to add one."
        )


def _text_part(base: Any, sites: list[RotarySite]) -> Any:
    """The innermost model that holds all of these rotary modules."""
    found, rotaries = base, {id(site.module) for site in sites}
    for part in base.modules():
        if isinstance(part, PreTrainedModel) and rotaries <= set(map(id, part.modules())):
            found = part
    return found


def _named_stacks(model: PreTrainedModel, base: Any, family: Family, parts: Parts | None) -> list[Stack]:
    """The stacks at the paths that a family names. `parts`: those of the base model, if they were found already."""
    whole = _require(base, family.part[0], family, model) if family.part else base
    found = []
    for path in family.stacks:
        root = module_at(whole, path)
        if root is not None:
            table = family.table if family.table_flag is None else None
            for needed in filter(None, (family.embeddings, table, family.patches)):
                _require(root, needed, family, model)
            kind = root.config.model_type if family.part else model.config.model_type
            own = parts if parts is not None and root is base else find_parts(root, kind)
            found.append(_stack(family, path, root, own))
    if not found:
        _require(whole, family.stacks[-1], family, model)
    return found


def _stack(family: Family, name: str, root: Any, parts: Parts) -> Stack:
    reached = {id(attention) for attention in parts.attentions}
    crosses = {id(cross) for cross in parts.crosses}
    biased = layers_that_take(root, family.bias) if family.bias else []
    return Stack(
        family=family,
        name=name,
        root=root,
        config=root.config,
        attentions=parts.attentions,
        crosses=parts.crosses,
        rotaries=parts.rotaries,
        unreached=[module for module in parts.rotators if id(module) not in reached],
        table=site_at(root, family.table) if family.table else None,
        offset=family.offset(root.config) if family.table else 0,
        embeddings=module_at(root, family.embeddings) if family.embeddings else None,
        biased=[layer for layer in biased if id(layer) not in crosses],
        biases=sites_named(root, family.biases) if family.biases else [],
        **(_grid_facts(family, root) if family.patches else _text_facts(root, parts)),
    )


def _text_facts(root: Any, parts: Parts) -> dict[str, Any]:
    layers = getattr(root.config, "num_hidden_layers", None)
    causal = getattr(parts.attentions[0], "is_causal", None) if parts.attentions else None
    if causal is None:
        causal = getattr(root.config, "is_decoder", True)
    return {
        "weight": root.get_input_embeddings(),
        "first_layer": next((found[0] for found in parts.lists if layers and len(found) == layers), None),
        "causal": bool(causal) and bool(getattr(root.config, "is_causal", True)),
    }


def _grid_facts(family: Family, root: Any) -> dict[str, Any]:
    """How a vision model cuts images into patches."""
    convolution, config = module_at(root, family.patches or ""), root.config
    patch = tuple(int(side) for side in convolution.stride)
    registers = int(getattr(config, family.registers)) if family.registers else 0
    return {
        "weight": convolution,
        "patch": patch,
        "grid": grid_size(getattr(config, family.length), patch),
        "special": family.offset(config) + registers,
    }


def grid_size(size: Any, patch: Sequence[int]) -> tuple[int, ...]:
    """Rows and columns of whole patches in an image of this size."""
    return tuple(side // step for side, step in zip(sides(size, len(patch)), patch, strict=True))


def sides(size: Any, axes: int = 2) -> tuple[int, ...]:
    """A height and a width; a config may give one number for both."""
    return tuple(map(int, size)) if isinstance(size, (list, tuple)) else (int(size),) * axes


def _groups(stack: Stack) -> list[Group]:
    """The groups of a stack: one for each type of layer that has its own frequencies, or just one."""
    buffers = {t: getattr(site.own, b) for site in reversed(stack.rotaries) for t, b in site.buffers.items()}
    found = []
    for layer_type in sorted(buffers) or [""]:
        layers = stack.attentions
        if layer_type:
            layers = [a for a in layers if stack.config.layer_types[a.layer_idx] == layer_type]
        name = "/".join(filter(None, (stack.name, layer_type)))
        found.append(Group(name, stack, layer_type, layers, buffers.get(layer_type)))
    return found


def _require(root: Any, path: str, family: Family, model: PreTrainedModel) -> Any:
    """The submodule at a path where the family says that there is one."""
    module = module_at(root, path)
    if module is None:
        raise UnsupportedModel(
            f"{type(model).__name__} (model type {model.config.model_type!r}) is not built as the {family.name!r} "
            f"family expects: {type(root).__name__} has no {path!r}. This transformers may be too new or too old."
        )
    return module


# --- finding parts of a model ----------------------------------------------------------------------------------------


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
    """The names of a rotary module's frequency buffers by layer type; "" where all layers share one."""
    matches = [FREQUENCIES.fullmatch(name) for name, _ in module.named_buffers(recurse=False)]
    return {match["layer_type"] or "": match[0] for match in matches if match}


def find_parts(root: nn.Module, kind: str) -> Parts:
    """The parts of a model whose config is of this model type."""
    found, known = Parts(), set()
    for path, module in root.named_modules():
        cls: Any = type(module)
        own: Any = module.inner if getattr(cls, "wraps_rotary", False) else module
        config = getattr(own, "config", None)
        config_kind = getattr(config, "model_type", None)
        if getattr(cls, "of_plan", False):  # which stands beside the model's own rotary module
            known |= {id(module), id(own)}
        if isinstance(module, nn.ModuleList):
            found.lists.append(module)
        if rotates(cls):
            found.rotators.append(module)
        if calls_interface(cls) and config_kind in (kind, None):
            other = CROSS.search(path) or CROSS.search(cls.__name__)
            (found.crosses if other else found.attentions).append(module)
        if config_kind == kind and hasattr(config, "rope_parameters") and id(module) not in known:
            buffers = frequency_buffers(own)
            if buffers:
                known.add(id(own))
                owner, _, name = path.rpartition(".")
                found.rotaries.append(RotarySite(root.get_submodule(owner), name, module, own, buffers))
    return found


def sites_named(root: nn.Module, names: tuple[str, ...]) -> list[Site]:
    """What any module holds under one of these names."""
    held = ((owner, name, getattr(owner, name, None)) for owner in root.modules() for name in names)
    return [Site(*site) for site in held if site[2] is not None]


def layers_that_take(root: nn.Module, argument: str) -> list[nn.Module]:
    """The innermost modules whose forward takes this argument."""
    found = [(path, m) for path, m in root.named_modules() if argument in argument_names(m)]
    return [m for path, m in found if not any(other.startswith(path + ".") for other, _ in found)]
