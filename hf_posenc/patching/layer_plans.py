"""A plan on a live model: which layers its parts are for, and the angles that each part gives them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch

from ..core.effects import Effect, Geometry, OwnTable
from ..errors import PosencError, UnsupportedCell
from ..families import Group, Places, Stack
from ..families.places import argument_names
from ..runtime.positions import ANGLES
from ..runtime.rotary import SEALED, STILL, PlannedRotary, Rotary
from ..schemes import Scheme
from ..schemes.plans import Draft, Plan
from .config_plans import config_plans_for
from .edits import Edit, Swap
from .other_readers import entries_for_none
from .own_temperature import can_differ, own_temperature, parameters_with_beta
from .rotary_site import MOVING, fixed_rotation, own_rope, rope_parameters_with, sealed_parameters
from .sealed_rotary import rotary_with


def plan_on(draft: Draft, where: Places) -> Plan:
    """A plan that was asked for, on the layers of this model."""
    _refuse_family(where)
    layers = where.stacks[0].attentions
    types = getattr(where.config, "layer_types", None) or []
    by_layer = [types[a.layer_idx] for a in layers] if types and all(hasattr(a, "layer_idx") for a in layers) else []
    return draft.on(len(layers), by_layer)


def _refuse_family(where: Places) -> None:
    stack = where.stacks[0]
    if len(where.stacks) > 1 or stack.grid or where.has_table or where.has_bias:
        raise UnsupportedCell(
            f"A plan gives layers schemes of their own, and the positions of this {where.config.model_type!r} model "
            "enter elsewhere: plans are for decoders and encoders with RoPE, or without positions."
        )
    if not stack.attentions or stack.unreached:
        raise UnsupportedCell(
            f"A plan works inside attention, and not all of {where.config.model_type!r} is in reach."
        )


def divide_places(where: Places, scheme: Scheme) -> Places:
    """The places of a model, with groups of layers divided by a plan. Layers that it leaves out stay in one group."""
    if not isinstance(scheme, Plan):
        return where
    _refuse_family(where)
    groups: list[Group] = []
    stack, several = where.stacks[0], len(where.groups) > 1
    last = max(index for part in scheme.parts for index in part.layers)
    if last >= len(stack.attentions):
        raise PosencError(
            f"The plan speaks of layer {last}, and this model has {len(stack.attentions)}: it is another."
        )
    for group in where.groups:
        own = {id(attention) for attention in group.attentions}
        left = dict.fromkeys(own)
        for number, part in enumerate(scheme.parts):
            layers = [a for i, a in enumerate(stack.attentions) if i in part.layers and id(a) in own]
            for layer in layers:
                left.pop(id(layer), None)
            if layers:
                name = f"{part.name}/{group.name}" if several else part.name
                suffix = "_" + re.sub(r"\W+", "_", name).strip("_") + f"_{number}"
                groups.append(replace(group, name=name, attentions=layers, suffix=suffix))
        if left or not own:
            groups.append(replace(group, attentions=[a for a in group.attentions if id(a) in left]))
    found = replace(where, groups=groups)
    if scheme.by is not None and all(way.by != scheme.by for way in config_plans_for(scheme, found)):
        raise PosencError(f"{scheme.by} of this model's config cannot say the plan: it was made for another model.")
    return found


def check_parts(
    where: Places, groups: list[Group], effects: dict[str, Effect], geometries: dict[str, Geometry]
) -> None:
    """Raise where parts of a plan want something that layers can only have together."""
    stack = where.stacks[0]
    if any(effect.table is not None and not isinstance(effect.table, OwnTable) for effect in effects.values()):
        raise UnsupportedCell(
            "A scheme that adds to the input speaks to all layers at once: it cannot be part of a plan."
        )
    if len({effect.forgets for effect in effects.values()}) > 1:
        raise UnsupportedCell("'streaming' drops keys from the cache of all layers: it cannot be a part of a plan.")
    complete = sum(len(group.attentions) for group in groups) == len(stack.attentions)
    meant = {effect.own_temperature for effect in effects.values()}
    alike = meant == {None} or (complete and len(meant) == 1)
    if own_temperature(stack) is not None and not alike and not can_differ(stack):
        raise UnsupportedCell(
            "This model has a temperature of its own for all layers, and the plan replaces it in some: give all "
            "groups a temperature, or none."
        )
    for group in groups:
        still = [stack.attentions.index(group.attentions[i]) for i in geometries[group.name].unturned]
        if still:
            raise UnsupportedCell(
                f"Layers {_join_numbers(still)}, of {group.name!r}, are not rotated by this "
                f"{stack.config.model_type!r} model's own code, and the plan would rotate them. Leave them out, "
                "or give them 'none'."
            )


def plan_rotary_edits(stack: Stack, groups: list[Group], effects: dict[str, Effect]) -> list[Edit]:
    """Keeps the model's own rotary module, which now tells positions, and puts one beside it for each part."""
    if len(stack.rotaries) != 1 or any(ANGLES not in argument_names(a) for g in groups for a in g.attentions):
        raise UnsupportedCell(
            f"The attention layers of this {stack.config.model_type!r} model are not told their angles: a plan cannot "
            "rotate some of them differently."
        )
    if any(own_rope(group)["rope_type"] in MOVING for group in groups):
        raise UnsupportedCell("The angles of this model's own RoPE follow the length, beside which no plan is served.")
    site = stack.rotaries[0]
    device = next(iter(site.module.buffers())).device
    parameters = sealed_parameters(stack, {group.layer_type: None for group in groups})
    parameters = parameters_with_beta(parameters, groups, effects)
    edits: list[Edit] = [
        Swap(stack.config, "rope_parameters", rope_parameters_with(stack.config.rope_parameters, parameters)),
        Swap(
            site.owner,
            site.name,
            Rotary(rotary_with({}, site, stack).to(device), carries_positions=True),
            beside=stack.weight,
        ),
    ]
    if list(parameters) == [""]:
        edits += entries_for_none(stack.config)
    for group in groups:
        module = rotary_with({group.layer_type: fixed_rotation(effects[group.name])}, site, stack)
        edits.append(
            Swap(stack.root, "posenc_rotary" + group.suffix, PlannedRotary(module.to(device), carries_positions=True))
        )
    return edits


def plan_rotary_faults(stack: Stack, groups: list[Group], effects: dict[str, Effect]) -> list[str]:
    """Where layers do not rotate as their part of the plan says."""
    faults = []
    for site in stack.rotaries:
        if not isinstance(site.module, Rotary) or not site.module.carries_positions:
            faults.append("the rotary module of the patch was replaced")
    for group in groups:
        rotary, meant = getattr(stack.root, "posenc_rotary" + group.suffix, None), fixed_rotation(effects[group.name])
        if not isinstance(rotary, PlannedRotary):
            faults.append(f"the layers {group.name!r} have lost their rotary module")
            continue
        live = getattr(rotary.inner, stack.rotaries[0].buffers[group.layer_type]).float().cpu()
        wanted = torch.tensor(meant.inv_freq) if meant else torch.zeros(len(live))
        if live.shape != wanted.shape or not torch.allclose(live, wanted, rtol=1e-5, atol=STILL):
            faults.append(f"the live frequencies of {group.name!r} are not those of the scheme")
        marked = own_rope(group)["rope_type"] == SEALED or not sealed_parameters(stack, [group.layer_type])
        if not marked:
            faults.append("the config does not say that its rotation is sealed")
    return faults


def layer_descriptions(scheme: Scheme, where: Places) -> dict[str, str]:
    """What each group of layers does, layers that the plan leaves out included; empty where there is no plan."""
    if not isinstance(scheme, Plan):
        return {}
    found = {}
    for part in scheme.parts:
        options = ", ".join(f"{key}={value}" for key, value in part.scheme.options().items())
        found[f"{part.name} ({_join_numbers(part.layers)})"] = part.scheme.name + (f" ({options})" if options else "")
    taken = {index for part in scheme.parts for index in part.layers}
    left = [index for index in range(len(where.stacks[0].attentions)) if index not in taken]
    if left:
        found[f"others ({_join_numbers(left)})"] = "the model's own positions"
    return found


def _join_numbers(layers: Any) -> str:
    return ", ".join(map(str, layers))
