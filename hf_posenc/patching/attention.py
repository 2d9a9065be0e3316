"""The sites inside attention: what its layers must do in addition, and what of their own they must leave out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from ..compat.models import ATTENTION, attention_of, has_mask_function
from ..compat.pytorch import has_pre_hook
from ..core.biases import Bias
from ..core.effects import CoordinateRotation, Effect, Geometry, Rotation
from ..errors import PosencError, UnsupportedCell
from ..families import Group, Places, Stack
from ..families.base import SEVERAL, TOLD_ONE
from ..families.places import argument_names
from ..runtime import attention as _attention  # noqa: F401  importing registers the attention functions
from ..runtime.grids import GridLink, before_image, before_rotation
from ..runtime.hooks import before_biased_layer
from ..runtime.positions import PREFIX, Link, Positions, before_attention
from .edits import Edit, Hooks, Swap
from .rotary_site import Effects
from .tables import module_faults

KERNELS = ("sdpa", "eager")
"""The kernels that our own attention is built on."""


def works_inside(effect: Effect, stack: Stack) -> bool:
    """Whether the work of attention layers changes."""
    added = effect.bias is not None or effect.pattern is not None or effect.temperature is not None or effect.apart
    return added or rotates_inside(effect, stack) or bool(stack.family.bias and stack.attentions)


def rotates_inside(effect: Effect, stack: Stack) -> bool:
    """Whether our attention rotates q and k, in place of the model's own rotary module."""
    return effect.rotation is not None and (effect.rotation.follows_length or not stack.rotaries)


def refuse_several_positions(where: Places, stack: Stack, effects: Effects) -> None:
    """Raise where a scheme needs one position for each token and the model has several (M-RoPE)."""
    kind = stack.config.model_type
    several = kind in SEVERAL or any([getattr(site.own, "mrope_section", None) for site in stack.rotaries])
    if not several or (stack.root is where.base and kind in TOLD_ONE):
        return
    if any(effect.table is not None or works_inside(effect, stack) for effect in effects.values()):
        raise UnsupportedCell(
            f"This scheme, its temperature or its plan needs one position for each token, and this {kind!r} model "
            "gives each several (M-RoPE: time, height and width). Schemes that rescale RoPE in all layers work: "
            "'linear', 'ntk', 'yarn', 'llama3'; and 'none'."
        )


def attention_edits(
    stack: Stack, groups: list[Group], effects: Effects, geometries: Mapping[str, Geometry]
) -> list[Edit]:
    edits: list[Edit] = [Swap(bias.owner, bias.name, None, beside=stack.weight) for bias in stack.biases]
    if stack.biased:
        edits.append(Hooks(stack.biased, before_biased_layer))
        edits += [Swap(layer, "posenc_family", stack.family) for layer in stack.biased]
    if not any(works_inside(effects[group.name], stack) for group in groups):
        return edits
    _refuse_unreached(stack, groups, effects)
    _refuse_kernel(stack.config)
    kernel = PREFIX + attention_of(stack.config)
    edits.append(Swap(stack.config, ATTENTION, kernel))
    if stack.grid:
        return edits + _grid_edits(stack, effects[groups[0].name])
    return edits + _text_edits(stack, groups, effects, geometries)


def _refuse_unreached(stack: Stack, groups: list[Group], effects: Effects) -> None:
    """Raise where the scheme is for layers that a patch cannot reach."""
    inside = [effects[group.name] for group in groups if works_inside(effects[group.name], stack)]
    lost = any(effect.rotation is None or effect.rotation.follows_length for effect in inside)
    lost |= any(effect.temperature is not None for effect in inside)
    if stack.rotaries and stack.unreached and lost:  # layers out of reach would lose their positions
        names = sorted({type(module).__name__ for module in stack.unreached})
        raise UnsupportedCell(
            f"This scheme, or its temperature, works inside attention, and {', '.join(names)} of this "
            f"{stack.config.model_type!r} model rotates its input by itself, out of reach. Schemes that rescale RoPE "
            "('ntk', 'yarn', 'linear'), without a temperature, work."
        )
    if not stack.attentions:
        raise UnsupportedCell(
            f"This scheme works inside attention, and {stack.config.model_type!r} computes its scores by itself "
            "instead of through transformers' attention interface, where they could be changed without copying its "
            "code. Schemes that change the position table or rescale RoPE work, where the model has one."
        )


def _refuse_kernel(config: Any) -> None:
    kernel = attention_of(config)
    if kernel not in KERNELS:
        raise PosencError(
            f"This scheme works inside attention, through the 'sdpa' and 'eager' kernels; the model uses {kernel!r}. "
            "Call model.set_attn_implementation('sdpa') first."
        )


def _text_edits(stack: Stack, groups: list[Group], effects: Effects, geometries: Mapping[str, Geometry]) -> list[Edit]:
    if any(effects[group.name].forgets for group in groups):
        _refuse_to_forget(stack, groups, geometries)
    edits: list[Edit] = []
    linked: set[int] = set()
    for group in groups:
        suffix = group.suffix or (f"_{group.layer_type}" if len(groups) > 1 else "")
        layers = layers_with_positions(group, geometries[group.name])
        if not layers:
            raise UnsupportedCell(
                f"This scheme works inside attention, and no layer of this {stack.config.model_type!r} model is of "
                f"the kind {group.layer_type!r} that its rope parameters name."
            )
        edits += _shared_edits(stack, effects[group.name], geometries[group.name], suffix)
        turned = group.layer_type if group.suffix and stack.rotaries else None
        for index, attention in enumerate(layers):
            link = Link(stack.root, suffix, attention, index, stack.family.table, turned)
            edits.append(Swap(attention, "posenc_link", link))
            linked.add(id(attention))
        edits.append(Hooks(layers, before_attention))
    others = [a for a in (*stack.attentions, *stack.crosses) if id(a) not in linked]
    return edits + [Swap(other, "posenc_link", Link(None)) for other in others]


def layers_with_positions(group: Group, geometry: Geometry) -> list[Any]:
    """The layers of a group that have positions."""
    return [a for i, a in enumerate(group.attentions) if i not in geometry.unturned]


def _shared_edits(stack: Stack, effect: Effect, geometry: Geometry, suffix: str) -> list[Edit]:
    """Puts what the layers of a group share on the base model."""
    weight: Any = stack.weight.weight
    rotation = effect.rotation if rotates_inside(effect, stack) else None
    assert not isinstance(rotation, CoordinateRotation)
    shared = Positions(rotation, weight.device, geometry.layout, effect.pattern, effect.forgets)
    edits: list[Edit] = [Swap(stack.root, "posenc" + suffix, shared)]
    if effect.bias is not None:
        bias = effect.bias.to(device=weight.device, dtype=weight.dtype)
        edits.append(Swap(stack.root, "posenc_bias" + suffix, bias))
    if effect.temperature is not None:
        temperature = effect.temperature.to(device=weight.device, dtype=weight.dtype)
        edits.append(Swap(stack.root, "posenc_temperature" + suffix, temperature))
    return edits


def _grid_edits(stack: Stack, effect: Effect) -> list[Edit]:
    """Lets layers rotate by the rows and columns of patches, which the model tells them."""
    if not isinstance(effect.rotation, CoordinateRotation) or effect.bias is not None or effect.pattern is not None:
        raise UnsupportedCell(
            "This scheme looks at the distance between two tokens, and patches of an image are apart by rows and by "
            "columns. Schemes for images rotate by coordinates, or add to the input."
        )
    edits: list[Edit] = [Hooks([stack.root], before_image)]
    edits.append(Swap(stack.root, "posenc_rotation", effect.rotation.to(stack.weight.weight.device)))
    for index, attention in enumerate(stack.attentions):
        edits.append(Swap(attention, "posenc_link", GridLink(stack.root, index, stack.special)))
    return [*edits, Hooks(stack.attentions, before_rotation)]


def _refuse_to_forget(stack: Stack, groups: list[Group], geometries: Mapping[str, Geometry]) -> None:
    """Raise where a cache cannot drop the same keys in all layers, once in each pass."""
    patched = {id(a) for group in groups for a in group.attentions}
    types = getattr(stack.config, "layer_types", None) or [""] * len(stack.attentions)
    sliding = getattr(stack.config, "sliding_window", None) or any("sliding" in name for name in types)
    if sliding or any(geometries[group.name].unturned for group in groups) or len(patched) < len(stack.attentions):
        raise UnsupportedCell(
            f"This scheme drops the same keys in every layer, and some layers of this {stack.config.model_type!r} "
            "model are of another kind: they have a sliding window of their own (config.sliding_window), or no "
            "positions."
        )
    if any({"layer_idx", "cycle_offset"} & set(argument_names(a)) for a in stack.attentions):
        raise UnsupportedCell("This scheme drops keys once a pass, and this model runs its layers more than once.")
    cached = DynamicCache(config=stack.config).layers  # none where all layers keep keys and values
    kinds = {type(cached[a.layer_idx]) for a in stack.attentions} if cached else set()
    if other := sorted(kind.__name__ for kind in kinds - {DynamicLayer}):
        raise UnsupportedCell(
            f"This scheme drops keys from the cache, and attention layers of this {stack.config.model_type!r} model "
            f"keep more than keys and values there ({', '.join(other)}). Use another scheme, such as 'self_extend'."
        )


# --- checks ----------------------------------------------------------------------------------------------------------


def attention_faults(
    stack: Stack, groups: list[Group], effects: Effects, geometries: Mapping[str, Geometry]
) -> list[str]:
    """Where the attention layers of a stack do not do what the scheme means. `groups`: those that are patched."""
    faults = []
    works = any([works_inside(effects[group.name], stack) for group in groups])
    if stack.biases:
        faults.append(f"{len(stack.biases)} relative position biases are back")
    for layer in stack.biased:
        if not has_pre_hook(layer, before_biased_layer):
            faults.append(f"a {type(layer).__name__} has lost the hook that takes its own bias away")
    name = attention_of(stack.config)
    if not works:
        return [*faults, f"the scheme needs no {name!r}"] if name.startswith(PREFIX) else faults
    if not name.startswith(PREFIX):
        faults.append(f"the attention is {name!r}, which drops the scheme; set it to {PREFIX + 'sdpa'!r}")
    elif not has_mask_function(name):
        faults.append(f"no mask function is registered for {name!r}, so that padding would be seen")
    if stack.grid:
        return faults + _grid_faults(stack, effects[groups[0].name])
    for group in groups:
        faults += _group_faults(group, effects[group.name], geometries[group.name])
    return faults


def _grid_faults(stack: Stack, effect: Effect) -> list[str]:
    assert isinstance(effect.rotation, CoordinateRotation)
    faults = _lost_hooks(stack.attentions, before_rotation)
    if not has_pre_hook(stack.root, before_image):
        faults.append("the model has lost the hook that tells its layers the rows and columns")
    return faults + module_faults(stack.root, "posenc_rotation", effect.rotation)


def _lost_hooks(layers: list[Any], hook: Any) -> list[str]:
    hooked = [has_pre_hook(layer, hook) for layer in layers]
    return [] if all(hooked) else [f"{hooked.count(False)} of {len(hooked)} attention layers have lost their hook"]


def _group_faults(group: Group, effect: Effect, geometry: Geometry) -> list[str]:
    layers = layers_with_positions(group, geometry)
    faults = _lost_hooks(layers, before_attention)
    if faults:
        return faults
    link = layers[0].posenc_link
    bias, temperature = link.bias, link.temperature
    if group.suffix and any(layer.posenc_link.suffix != group.suffix for layer in layers):
        return [f"some of the layers {group.name!r} belong to another part of the plan"]
    shared = getattr(link.root, "posenc" + link.suffix, None)
    if shared is None:
        return ["the base model has lost its 'posenc' module"]
    if rotates_inside(effect, group.stack):
        rotation = effect.rotation
        assert isinstance(rotation, Rotation)
        live = shared.inv_freq.float().cpu()
        if shared.rotation != rotation or not torch.equal(live, torch.tensor(rotation.inv_freq)):
            faults.append("the live frequencies are not those of the scheme")
    if shared.pattern != effect.pattern or shared.forgets != effect.forgets:
        faults.append("the pattern of keys is not that of the scheme")
    if str(temperature) != str(effect.temperature):
        faults.append(f"the temperature is {temperature}, and the scheme means {effect.temperature}")
    return faults + _bias_faults(bias, effect.bias)


def _bias_faults(live: Bias | None, meant: Bias | None) -> list[str]:
    if live is None or meant is None:
        lost = ["the bias of the scheme is missing"] if meant is not None else []
        return lost if live is None else ["there is a bias that the scheme lacks"]
    numbers, wanted = dict(live.named_buffers()), dict(meant.named_buffers())
    other = [key for key in wanted if key in numbers and not torch.equal(numbers[key].cpu(), wanted[key])]
    return [f"{key} of the bias are not those of the scheme" for key in other]
