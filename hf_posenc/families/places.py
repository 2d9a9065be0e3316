"""Every place in one live model where positions enter, found once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel, __version__

from ..compat.models import release
from ..errors import UnsupportedModel
from .base import FAMILIES, GENERIC, REFUSED, Family, family_of
from .finding import Parts, RotarySite, Site, held_in, layers_with, module_at, parts_of, site_at
from .sound import refuse_unsound


@dataclass(frozen=True, kw_only=True, eq=False)
class Stack:
    """Layers that run one after another: a decoder, an encoder, or a vision tower."""

    family: Family
    name: str
    root: Any
    """The headless model, or its encoder or decoder."""
    config: Any
    """The config that speaks of its positions."""
    weight: Any
    """The module that turns the input into states, and has a weight: its device and dtype are those of the stack."""
    attentions: list[Any]
    """Self-attention behind transformers' attention interface."""
    crosses: list[nn.Module]
    rotaries: list[RotarySite]
    unreached: list[nn.Module]
    """Layers that rotate their input by themselves, out of reach of the attention interface."""
    table: Site | None
    offset: int
    """How many rows of the table stand before that of position 0."""
    embeddings: Any
    """The module that reads the table, or None where nothing is to be known of it."""
    biased: list[nn.Module]
    """The layers that take the family's own position bias."""
    biases: list[Site]
    """The position biases that the model has been built with, and can do without."""
    causal: bool = False
    first_layer: nn.Module | None = None
    """None where no list of as many layers as the config says was found, or looked for."""
    patch: tuple[int, ...] = ()
    """Height and width of a patch in pixels, on vision models."""
    grid: tuple[int, ...] = ()
    """Rows and columns of patches in images of the size that the config speaks of."""
    special: int = 0
    """Tokens of attention that stand before the patches, and have no coordinates."""


@dataclass(frozen=True, eq=False)
class Group:
    """Layers of a stack that share one set of angles: all of them, or those of one type."""

    name: str
    stack: Stack
    layer_type: str
    """As in `config.layer_types`; "" where the config makes no difference between layers."""
    attentions: list[Any]
    inv_freq: Tensor | None
    """The frequencies that were live when the places were found; None on stacks without RoPE."""
    suffix: str = ""
    """Of the names of its modules, where a plan has divided the layers that share angles."""


@dataclass(frozen=True, eq=False)
class Places:
    """Where positions enter one live model."""

    family: Family
    model: PreTrainedModel
    base: Any
    model_config: Any
    config: Any
    """The config that speaks of positions: the model's own, or that of its text or vision part."""
    stacks: list[Stack]
    groups: list[Group]
    """Every group of layers that has angles of its own, or could have."""
    has_rotary: bool
    has_table: bool
    has_bias: bool
    own_configs: Any = None
    """What gives the model configs of its own, where it is about to be patched: those above are these then."""


def places(model: PreTrainedModel) -> Places:
    """Find every place in the live model; raises with what was looked for and is missing."""
    refuse_unsound(model.config)
    kind = model.config.model_type
    if kind in REFUSED:
        raise UnsupportedModel(f"Models of type {kind!r} cannot be patched: {REFUSED[kind]}.")
    family, base = family_of(kind), model.base_model
    if family is not None and release() < family.since:
        raise UnsupportedModel(
            f"Models of the {family.name!r} family are built otherwise by transformers {__version__}: to patch them "
            f"needs {'.'.join(map(str, family.since))} or later. Upgrade it (pip install -U transformers)."
        )
    text = model.config.get_text_config()
    parts = parts_of(base, text.model_type)
    if family is not None and (family.rotary or not parts.rotaries):
        stacks = _named_stacks(model, base, family)
    else:
        _refuse_unknown(model, parts.rotaries)
        family, root = FAMILIES.registered()[GENERIC], _text_part(base, parts.rotaries)
        stacks = [_stack(family, "", root, parts if root is base else parts_of(root, text.model_type))]
    return Places(
        family=family,
        model=model,
        base=base,
        model_config=model.config,
        config=stacks[0].config,
        stacks=stacks,
        groups=[group for stack in stacks for group in _groups(stack)],
        has_rotary=any(stack.rotaries for stack in stacks),
        has_table=family.table is not None,
        has_bias=family.bias is not None,
    )


def _refuse_unknown(model: PreTrainedModel, sites: list[RotarySite]) -> None:
    """Raise where the family for whatever rotates cannot serve a model either."""
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
    wanted = {id(site.module) for site in sites}
    parts = [m for m in base.modules() if isinstance(m, PreTrainedModel)]
    return [base, *(p for p in parts if wanted <= {id(m) for m in p.modules()})][-1]


def _named_stacks(model: PreTrainedModel, base: Any, family: Family) -> list[Stack]:
    part = _need(base, family.part[0], family, model) if family.part else base
    found = []
    for path in family.stacks:
        root = module_at(part, path)
        if root is not None:
            table = family.table if family.table_flag is None else None
            for needed in filter(None, (family.embeddings, table, family.patches)):
                _need(root, needed, family, model)
            kind = root.config.model_type if family.part else model.config.model_type
            found.append(_stack(family, path, root, parts_of(root, kind)))
    if not found:
        _need(part, family.stacks[-1], family, model)
    return found


def _stack(family: Family, name: str, root: Any, parts: Parts) -> Stack:
    reached = {id(attention) for attention in parts.attentions}
    others = {id(cross) for cross in parts.crosses}
    biased = layers_with(root, family.bias) if family.bias else []
    return Stack(
        family=family,
        name=name,
        root=root,
        config=root.config,
        attentions=parts.attentions,
        crosses=parts.crosses,
        rotaries=parts.rotaries,
        unreached=[module for module in parts.rotating if id(module) not in reached],
        table=site_at(root, family.table) if family.table else None,
        offset=family.offset(root.config) if family.table else 0,
        embeddings=module_at(root, family.embeddings) if family.embeddings else None,
        biased=[layer for layer in biased if id(layer) not in others],
        biases=held_in(root, family.biases) if family.biases else [],
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
    """Rows and columns of patches in an image of this size; a rest of pixels belongs to none."""
    return tuple(side // step for side, step in zip(sides(size, len(patch)), patch, strict=True))


def sides(size: Any, axes: int = 2) -> tuple[int, ...]:
    """A height and a width, where a config may have one number for both."""
    return tuple(map(int, size)) if isinstance(size, (list, tuple)) else (int(size),) * axes


def _groups(stack: Stack) -> list[Group]:
    """The groups of a stack: one for each type of layer that has frequencies of its own, or just one."""
    buffers = {t: getattr(site.own, b) for site in reversed(stack.rotaries) for t, b in site.buffers.items()}
    found = []
    for layer_type in sorted(buffers) or [""]:
        layers = stack.attentions
        if layer_type:
            layers = [a for a in layers if stack.config.layer_types[a.layer_idx] == layer_type]
        name = "/".join(filter(None, (stack.name, layer_type)))
        found.append(Group(name, stack, layer_type, layers, buffers.get(layer_type)))
    return found


def _need(root: Any, path: str, family: Family, model: PreTrainedModel) -> Any:
    module = module_at(root, path)
    if module is None:
        raise UnsupportedModel(
            f"{type(model).__name__} (model type {model.config.model_type!r}) is not built as the {family.name!r} "
            f"family expects: {type(root).__name__} has no {path!r}. This transformers may be too new or too old."
        )
    return module
