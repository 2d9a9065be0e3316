"""The geometry of a live model."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..core.effects import Geometry
from ..errors import PosencError, UnsupportedModel, suggestion
from ..families import Group, Places
from ..runtime.rotation import HALVES
from ..schemes import Scheme
from ..schemes.plans import Plan
from .layout import KNOWN, watch_layout
from .records import Geometries
from .rotary_site import own_rope
from .sizes import config_length

LOCAL = ("sliding", "local", "chunked")
"""Words in the names of layer types that never look far. Such layers are patched only on request."""
LENGTHS = ("target_length", "factor", "trained_length")
"""Options of every scheme that make sense only for text."""


def measure(
    where: Places, scheme: Scheme, existing: str | None, layer_types: Sequence[str] | str | None = None
) -> Geometries:
    """The geometries that a scheme starts from, for the groups of layers that are to be patched.

    Options of the scheme, such as `trained_length`, correct what the config says.
    """
    if isinstance(scheme, Plan):
        if layer_types is not None:
            raise PosencError("A plan says itself which layers are meant: leave layer_types out.")
        planned = [group for group in where.groups if group.suffix]
        found = {}
        for group in planned:  # a comprehension would be one more frame for `stacklevel` in some versions of Python
            found[group.name] = _geometry(where, group, scheme.part(group.name), existing, scheme.apart)
        return found
    if len(where.family.axes) > 1:
        _refuse_lengths(where, {**{n: getattr(scheme, n) for n in LENGTHS}, "existing": existing}, layer_types)
    if scheme.adds_to_input and layer_types not in (None, "all"):
        raise PosencError(f"{scheme.name!r} adds to the input of all layers: layer_types cannot be given for it.")
    groups = where.groups if scheme.adds_to_input else groups_of_types(where, layer_types)
    found = {}
    for group in groups:
        found[group.name] = _geometry(where, group, scheme, existing)
    return found


def _refuse_lengths(where: Places, options: dict[str, Any], layer_types: Any) -> None:
    """Raise where a vision model is given options that make sense only for text, or cuts images in an unknown way."""
    kind = where.config.model_type
    for name, value in {**options, "layer_types": layer_types}.items():
        if value is not None:
            raise PosencError(
                f"{name}={value!r} is about texts, and this {kind!r} model reads images, of any size once it is "
                "patched. Leave it out; 'learned' takes image_size= for the size of its table."
            )
    if any(stack.weight.kernel_size != stack.weight.stride for stack in where.stacks):
        raise UnsupportedModel(f"The patches of this {kind!r} model overlap or leave gaps.")


def groups_of_types(where: Places, layer_types: Sequence[str] | str | None) -> list[Group]:
    """The groups of layers to patch: those of the types asked for, or all without a sliding window."""
    known = sorted({group.layer_type for group in where.groups if group.layer_type})
    if layer_types is None:
        far = [g for g in where.groups if not any(word in g.layer_type for word in LOCAL)]
        return far or where.groups
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
    return [group for group in where.groups if group.layer_type in wanted]


def _geometry(where: Places, group: Group, scheme: Scheme, existing: str | None, planned: bool = False) -> Geometry:
    config, rope, layout = where.config, None, HALVES
    unturned: tuple[int, ...] = ()
    trained = config_length(where)
    if group.stack.grid:
        rows, columns = group.stack.grid
        trained = rows * columns
    if group.inv_freq is not None:
        rope = own_rope(group)
        if rope["rope_type"] != "default" and scheme.rescales:
            rope, trained = _start_on_scaled(rope, trained, existing, scheme)
        if scheme.follows or (planned and scheme.name != "none"):
            layout, unturned = watch_layout(group)
    length = scheme.trained_length or trained
    if length is None:
        raise PosencError(
            f"The config of this {config.model_type!r} model does not say how long a text it was trained on: "
            "give trained_length=."
        )
    found = model_sizes(group)
    # Other types of models may leave some layers or some channels unrotated.
    whole = rope is not None and group.stack.config.model_type in KNOWN and found["rotary_dim"] == found["head_dim"]
    counted = {"layers": len(group.attentions) - len(unturned)} if scheme.per_layer else {}
    geometry = Geometry(
        **{**counted, **found},
        trained_length=length,
        initializer_range=float(getattr(config, "initializer_range", 0.02)),
        rope=rope,
        layout=layout,
        unturned=unturned,
        grid=group.stack.grid,
        whole=whole and scheme.temperature is not None and not planned,
    )
    if planned and unturned and scheme.effect_on(geometry).rotation is None:  # it works on every layer
        return replace(geometry, unturned=(), layers=len(group.attentions) if scheme.per_layer else 0)
    return geometry


def model_sizes(group: Group) -> dict[str, Any]:
    """The numbers of a geometry that depend on the model's weights alone."""
    stack, head = group.stack, _head_dim(group)
    return {
        "hidden_size": stack.config.hidden_size,
        "num_heads": stack.config.num_attention_heads,
        "head_dim": head,
        "rotary_dim": head if group.inv_freq is None else 2 * len(group.inv_freq),
        "causal": stack.causal,
        **({"patch": stack.patch, "layers": len(stack.attentions)} if stack.grid else {}),
    }


def _head_dim(group: Group) -> int:
    config = group.stack.config
    first = group.attentions[0] if group.attentions else None
    for holder, name in ((first, "head_dim"), (first, "attention_head_size"), (config, "head_dim"), (config, "d_kv")):
        if isinstance(getattr(holder, name, None), int):
            return int(getattr(holder, name))
    return int(config.hidden_size // config.num_attention_heads)


def _start_on_scaled(
    rope: dict[str, Any], trained: int | None, existing: str | None, scheme: Scheme
) -> tuple[dict[str, Any], int | None]:
    """The RoPE and the length to start from on a model whose RoPE is scaled already."""
    kind, original = rope["rope_type"], rope.get("original_max_position_embeddings")
    if existing is None:
        warnings.warn(
            f"This model's RoPE is scaled already ({kind!r}, factor {rope.get('factor')}): {scheme.name!r} extends it "
            f"from {trained} tokens. Pass existing='extend' to say that this is meant, or existing='replace' to drop "
            "the old scaling first.",
            stacklevel=6,  # the caller of `patch_model`
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
