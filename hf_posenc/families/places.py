"""Every place in one live model where positions enter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..compat.models import rotates
from ..errors import UnsupportedModel
from .base import FAMILIES, REFUSED, Family
from .finding import (
    Site,
    attention_layers,
    frequency_buffers,
    layer_list,
    layers_with,
    module_at,
    rotary_sites,
    site_at,
)


@dataclass(frozen=True)
class Stack:
    """Layers that run one after another: a decoder, or an encoder."""

    family: Family
    name: str
    root: Any
    """The headless model, or its encoder or decoder."""
    attentions: list[Any]
    """Self-attention behind transformers' attention interface."""
    crosses: list[nn.Module]
    rotaries: list[Site]
    unreached: list[nn.Module]
    """Layers that rotate their input by themselves, out of reach of the attention interface."""

    @property
    def config(self) -> Any:
        return self.root.config

    @property
    def table(self) -> Site | None:
        return site_at(self.root, self.family.table) if self.family.table else None

    @property
    def embeddings(self) -> nn.Module | None:
        return module_at(self.root, self.family.embeddings) if self.family.embeddings else None

    @property
    def biased(self) -> list[nn.Module]:
        """The layers that take the family's own position bias."""
        crosses = {id(cross) for cross in self.crosses}
        layers = layers_with(self.root, self.family.bias) if self.family.bias else []
        return [layer for layer in layers if id(layer) not in crosses]

    @property
    def first_layer(self) -> nn.Module | None:
        layers = layer_list(self.root, self.config.num_hidden_layers)
        return None if layers is None else layers[0]

    @property
    def causal(self) -> bool:
        given = getattr(self.attentions[0], "is_causal", None) if self.attentions else None
        if given is None:
            given = getattr(self.config, "is_decoder", True)
        return bool(given) and bool(getattr(self.config, "is_causal", True))


@dataclass(frozen=True)
class Group:
    """Layers of a stack that share one set of angles: all of them, or those of one type."""

    name: str
    stack: Stack
    layer_type: str
    """As in `config.layer_types`; "" where the config makes no difference between layers."""

    @property
    def attentions(self) -> list[Any]:
        if not self.layer_type:
            return self.stack.attentions
        types = self.stack.config.layer_types
        return [a for a in self.stack.attentions if types[a.layer_idx] == self.layer_type]

    def inv_freq(self) -> Any:
        """The live frequencies; None on stacks without RoPE."""
        for site in self.stack.rotaries:
            names = frequency_buffers(site.module)
            if self.layer_type in names:
                return getattr(site.module, names[self.layer_type])
        return None


@dataclass(frozen=True)
class Places:
    """Where positions enter one live model."""

    family: Family
    model: PreTrainedModel
    stacks: list[Stack]

    @property
    def base(self) -> Any:
        return self.model.base_model

    @property
    def config(self) -> Any:
        """The config that speaks of positions: the model's own, or that of its text part."""
        return self.stacks[0].config

    @property
    def has_rotary(self) -> bool:
        return any(stack.rotaries for stack in self.stacks)

    @property
    def has_table(self) -> bool:
        return self.family.table is not None

    @property
    def has_bias(self) -> bool:
        return self.family.bias is not None

    def groups(self) -> Iterator[Group]:
        """Every group of layers that has angles of its own, or could have."""
        for stack in self.stacks:
            types = sorted({t for site in stack.rotaries for t in frequency_buffers(site.module)}) or [""]
            for layer_type in types:
                yield Group("/".join(filter(None, (stack.name, layer_type))), stack, layer_type)


def places(model: PreTrainedModel) -> Places:
    """Find every place in the live model; raises with what was looked for and is missing."""
    kind = model.config.model_type
    if kind in REFUSED:
        raise UnsupportedModel(f"Models of type {kind!r} cannot be patched: {REFUSED[kind]}.")
    text = model.config.get_text_config()
    sites = rotary_sites(model.base_model, text.model_type)
    for family in FAMILIES.values():
        if kind in family.model_types and (family.rotary or not sites):
            return Places(family, model, _stacks(model, family))
    if not sites:
        supported = "; ".join(f"{f.name}: {', '.join(f.model_types)}" for f in FAMILIES.values() if f.model_types)
        raise UnsupportedModel(
            f"Models of type {kind!r} are not supported. Looked for: a module that holds `inv_freq` and reads "
            f"`config.rope_parameters`, as nearly all RoPE models have, and found none. Types that are known by name: "
            f"{supported}. A family is one small file of module paths; the README says how to add one."
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModel(
            f"Models of type {kind!r} are not supported: they have an encoder and a decoder with RoPE, and the family "
            "for unknown RoPE models knows one stack of layers. A family that names both is a small file; the README "
            "says how to add one."
        )
    root = _text_part(model.base_model, sites)
    return Places(FAMILIES["rotary"], model, [_stack(FAMILIES["rotary"], "", root, text.model_type)])


def _text_part(base: Any, sites: list[Site]) -> Any:
    """The innermost model that holds all of these rotary modules."""
    wanted = {id(site.module) for site in sites}
    parts = [m for m in base.modules() if isinstance(m, PreTrainedModel)]
    return [base, *(p for p in parts if wanted <= {id(m) for m in p.modules()})][-1]


def _stacks(model: PreTrainedModel, family: Family) -> list[Stack]:
    kind, found = model.config.model_type, []
    for path in family.stacks:
        root = module_at(model.base_model, path)
        if root is not None:
            for needed in filter(None, (family.table, family.embeddings)):
                _need(root, needed, family, model)
            found.append(_stack(family, path, root, kind))
    if not found:
        _need(model.base_model, family.stacks[-1], family, model)
    return found


def _stack(family: Family, name: str, root: Any, kind: str) -> Stack:
    own, crosses = attention_layers(root, kind)
    reached = {id(attention) for attention in own}
    unreached = [m for m in root.modules() if rotates(m) and id(m) not in reached]
    return Stack(family, name, root, own, crosses, rotary_sites(root, kind), unreached)


def _need(root: Any, path: str, family: Family, model: PreTrainedModel) -> Any:
    module = module_at(root, path)
    if module is None:
        raise UnsupportedModel(
            f"{type(model).__name__} (model type {model.config.model_type!r}) is not built as the {family.name!r} "
            f"family expects: {type(root).__name__} has no {path!r}. This transformers may be too new or too old."
        )
    return module
