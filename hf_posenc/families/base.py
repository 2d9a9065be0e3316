"""Where positions enter the models of a family: data, checked against the live model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..registry import Registry, UnsupportedModel

FAMILIES: Registry[Family] = Registry("family")


@dataclass(frozen=True, kw_only=True)
class Family:
    """Paths are from the base model (`model.base_model`), those of attention from a layer."""

    name: str
    model_types: tuple[str, ...]
    layers: str
    self_attention: str
    cross_attention: str | None = None
    table: str | None = None
    """The learned position table, for families that have one."""
    embeddings: str | None = None
    """A module that makes its own positions from buffers of fixed length, and must be given them instead."""
    rotary: str | None = None

    @property
    def positions(self) -> str:
        return "RoPE" if self.rotary else "table"


@dataclass(frozen=True)
class Places:
    """The modules of one live model where positions enter."""

    family: Family
    model: PreTrainedModel
    base: Any
    """The headless model, whose modules are looked up by path."""
    layers: list[nn.Module]
    attentions: list[nn.Module]
    crosses: list[nn.Module]

    @property
    def config(self) -> Any:
        return self.base.config

    @property
    def table(self) -> nn.Embedding | None:
        return module_at(self.base, self.family.table) if self.family.table else None

    @property
    def rotary(self) -> Any:
        return module_at(self.base, self.family.rotary) if self.family.rotary else None

    @property
    def embeddings(self) -> nn.Module | None:
        return module_at(self.base, self.family.embeddings) if self.family.embeddings else None


def module_at(root: Any, path: str) -> Any:
    """The submodule at a dotted path, or None."""
    for name in path.split("."):
        root = getattr(root, name, None)
        if root is None:
            return None
    return root


def register(family: Family) -> Family:
    return FAMILIES.add(family.name, family)


def family_of(model: PreTrainedModel) -> Family:
    """The family that a model belongs to; raises with what is supported."""
    kind = model.config.model_type
    for family in FAMILIES.values():
        if kind in family.model_types:
            return family
    supported = "; ".join(f"{f.name}: {', '.join(f.model_types)}" for f in FAMILIES.values())
    raise UnsupportedModel(
        f"Models of type {kind!r} are not supported: no family lists that type. Supported: {supported}. "
        "A family is one small file of module paths; the README says how to add one."
    )


def places(model: PreTrainedModel) -> Places:
    """Find every place in the live model; raises with the path that is missing."""
    family, base = family_of(model), model.base_model
    layers = _need(base, family.layers, family, model)
    if not len(layers):
        raise UnsupportedModel(f"{type(model).__name__} has no layers at {family.layers!r}: nothing to patch.")
    for path in (family.table, family.rotary, family.embeddings):
        if path:
            _need(base, path, family, model)
    attentions = [_need(layer, family.self_attention, family, model) for layer in layers]
    found = [module_at(layer, family.cross_attention or "-") for layer in layers]
    return Places(family, model, base, list(layers), attentions, [m for m in found if m is not None])


def _need(root: Any, path: str, family: Family, model: PreTrainedModel) -> Any:
    module = module_at(root, path)
    if module is None:
        raise UnsupportedModel(
            f"{type(model).__name__} (model type {model.config.model_type!r}) is not built as the {family.name!r} "
            f"family expects: {type(root).__name__} has no {path!r}. This transformers may be too new or too old."
        )
    return module
