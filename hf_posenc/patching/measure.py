"""The geometry of a live model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

from ..core.effects import Geometry
from ..errors import PosencError, UnsupportedModel, suggestion
from ..families import Group, Places
from ..runtime.positions import HALVES
from ..schemes import Scheme
from .layout import watched_layout

Geometries = dict[str, Geometry]
"""By group of layers; "" where a model has just one."""
LOCAL = ("sliding", "local", "chunked")
"""In the names of layer types that never look far, and so are left alone unless asked for."""


def measure(
    where: Places, scheme: Scheme, existing: str | None, layer_types: Sequence[str] | str | None = None
) -> Geometries:
    """The geometries that a scheme starts from, with the user's corrections, for the layers that it is meant for."""
    if scheme.adds_to_input and layer_types not in (None, "all"):
        raise PosencError(f"{scheme.name!r} adds to the input of all layers: layer_types cannot be given for it.")
    groups = list(where.groups()) if scheme.adds_to_input else chosen(where, layer_types)
    return {group.name: _geometry(where, group, scheme, existing) for group in groups}


def chosen(where: Places, layer_types: Sequence[str] | str | None) -> list[Group]:
    """The groups of layers to patch: all but those with a short sight, or those asked for."""
    groups = list(where.groups())
    known = sorted({group.layer_type for group in groups if group.layer_type})
    if layer_types is None:
        far = [g for g in groups if not any(word in g.layer_type for word in LOCAL)]
        return far or groups
    if not known:
        raise PosencError(
            f"layer_types={layer_types!r} was given, and this {where.config.model_type!r} model has one set of "
            "positions for all its layers. Leave it out."
        )
    wanted = known if layer_types == "all" else [layer_types] if isinstance(layer_types, str) else list(layer_types)
    if not wanted:
        raise PosencError(f"layer_types is empty: name some of {', '.join(known)}, or 'all', or leave it out.")
    for name in wanted:
        if name not in known:
            raise PosencError(f"This model has no layers of type {name!r}.{suggestion(name, ['all', *known])}")
    return [group for group in groups if group.layer_type in wanted]


def _geometry(where: Places, group: Group, scheme: Scheme, existing: str | None) -> Geometry:
    config, rope = where.config, None
    trained = own_length(where)
    inv_freq = group.inv_freq()
    if inv_freq is not None:
        rope = own_rope(group)
        if rope["rope_type"] != "default" and scheme.rescales:
            rope, trained = _on_scaled(rope, trained, existing, scheme)
    layout, unturned = watched_layout(group) if inv_freq is not None and scheme.follows else (HALVES, ())
    length = scheme.trained_length or trained
    if length is None:
        raise PosencError(
            f"The config of this {config.model_type!r} model does not say how long a text it was trained on: "
            "give trained_length=."
        )
    return Geometry(
        **sizes(group),
        trained_length=length,
        initializer_range=float(getattr(config, "initializer_range", 0.02)),
        rope=rope,
        layout=layout,
        unturned=unturned,
    )


def sizes(group: Group) -> dict[str, Any]:
    """The numbers of a geometry that weights are made for."""
    config, inv_freq, head = group.stack.config, group.inv_freq(), _head_dim(group)
    return {
        "hidden_size": config.hidden_size,
        "num_heads": config.num_attention_heads,
        "head_dim": head,
        "rotary_dim": head if inv_freq is None else 2 * len(inv_freq),
        "causal": group.stack.causal,
    }


def own_length(where: Places) -> int | None:
    """How long a text the config allows, in tokens; None where it says nothing."""
    length = getattr(where.config, where.family.length, None)
    if not isinstance(length, int) or isinstance(length, bool) or length <= 0:
        return None
    return length - skipped_rows(where)


def skipped_rows(where: Places) -> int:
    """What the config's length counts that are not positions."""
    return where.family.offset(where.config) if where.family.counted else 0


def _head_dim(group: Group) -> int:
    config = group.stack.config
    first = group.attentions[0] if group.attentions else None
    for holder, name in ((first, "head_dim"), (first, "attention_head_size"), (config, "head_dim"), (config, "d_kv")):
        if isinstance(getattr(holder, name, None), int):
            return int(getattr(holder, name))
    return int(config.hidden_size // config.num_attention_heads)


def rope_of(config: Any, layer_type: str) -> Any:
    """The rope parameters of a config for one type of layer."""
    rope = getattr(config, "rope_parameters", None)
    return rope.get(layer_type) if layer_type and isinstance(rope, dict) else rope


def own_rope(group: Group) -> dict[str, Any]:
    config = group.stack.config
    rope = rope_of(config, group.layer_type)
    if not isinstance(rope, dict) or not isinstance(rope.get("rope_theta"), (int, float)):
        raise UnsupportedModel(
            f"config.rope_parameters of this {config.model_type!r} model should be one set with a rope_theta"
            f"{f' for {group.layer_type!r}' if group.layer_type else ''}, and is {rope!r}."
        )
    return {"rope_type": "default", **copy.deepcopy(rope)}


def _on_scaled(
    rope: dict[str, Any], trained: int | None, existing: str | None, scheme: Scheme
) -> tuple[dict[str, Any], int | None]:
    """What to start from on a model whose RoPE is scaled already."""
    kind, original = rope["rope_type"], rope.get("original_max_position_embeddings")
    if existing is None:
        warnings.warn(
            f"This model's RoPE is scaled already ({kind!r}, factor {rope.get('factor')}): {scheme.name!r} extends it "
            f"from {trained} tokens. Pass existing='extend' to say that this is meant, or existing='replace' to drop "
            "the old scaling first.",
            stacklevel=5,
        )
    if existing != "replace":
        return rope, trained
    if kind == "dynamic":
        original = trained
    if original is None and scheme.trained_length is None:
        raise PosencError(
            f"The config does not say at which length this model was trained before its {kind!r} scaling: "
            "existing='replace' needs trained_length=."
        )
    return {"rope_type": "default", "rope_theta": rope["rope_theta"]}, original or trained
