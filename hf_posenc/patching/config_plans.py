"""Plans that a config can say, so that any transformers runs them.

There are two ways: RoPE parameters for each type of layer, where the plan divides no type; or a list of the layers
that rotate, where the family has such a list and nothing else depends on it.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..core.effects import Effect, Geometry, OwnTable, Rotation, Span
from ..errors import UnsupportedCell
from ..families import Group, Places, Stack
from ..runtime.rotary import Rotary
from ..schemes import Scheme
from ..schemes.plans import BY_LIST, BY_TYPES, Plan
from .edits import Edit, Entry, Swap
from .grades import is_sealed
from .layers import changed_values
from .other_readers import LAYERS, entries_for_others
from .rotary_site import MOVING, own_rope, rotary_edits, rotary_faults, scaling_of
from .sealed_rotary import rotary_with

LISTED = {"smollm3": "use_rope"}
"""Model types whose layers rotate where the list has a 1 and differ in nothing else; and the attribute in which an
attention layer keeps its entry. Llama 4 is not here: its norms and a temperature depend on the list too, and runtimes
that know the model by name rotate three layers of four whatever the list says."""
Effects = Mapping[str, Effect]


def config_plans_for(scheme: Scheme, where: Places) -> list[Plan]:
    """The plan in each way that this model's config might say it. The edits show whether the config really can."""
    if not isinstance(scheme, Plan):
        return []
    whole = all(count == 1 for count in Counter(group.layer_type for group in where.groups).values())
    listed = where.config.model_type in LISTED
    return [replace(scheme, by=by) for by, able in ((BY_TYPES, whole), (BY_LIST, listed)) if able]


def check_config_plan(where: Places, effects: Effects) -> None:
    """Raise where some part of a plan does what no config can say."""
    for effect in effects.values():
        added = effect.table is not None and not isinstance(effect.table, OwnTable)
        if added or effect.own_temperature is not None or is_sealed([effect], where.family):
            raise UnsupportedCell("This plan does what no config can say.")


# --- a list of the layers that rotate --------------------------------------------------------------------------------


def layer_list_edits(
    stack: Stack,
    groups: list[Group],
    effects: Effects,
    geometries: Mapping[str, Geometry],
    reach: Span,
    before: Sequence[int],
) -> list[Edit]:
    """Writes the plan into the list (which was `before`), and stops runtimes that ignore the list."""
    flags, attribute = _flags(groups, effects, before), LISTED[stack.config.model_type]
    _refuse_other_layers(stack, before, flags)
    edits: list[Edit] = [Swap(stack.config, BY_LIST, flags)]
    edits += [Swap(layer, attribute, flags[layer.layer_idx]) for layer in stack.attentions]
    turned = _groups_that_rotate(groups, effects)
    if turned:
        _refuse_several(stack, turned, groups, effects, flags)
        edits += rotary_edits(stack, turned[:1], dict(effects), geometries, reach, False)
    else:
        rope, site = own_rope(groups[0]), stack.rotaries[0]
        if rope["rope_type"] in MOVING:
            raise UnsupportedCell("The angles of this model's own RoPE follow the length.")
        live = tuple(groups[0].inv_freq.float().tolist())  # type: ignore[union-attr]
        own = Rotation(inv_freq=live, attention_scaling=scaling_of(site.own, ""))
        edits += entries_for_others(stack.config, rope, own, reach.target)
        module = rotary_with({}, site, stack).to(groups[0].inv_freq.device)  # type: ignore[union-attr]
        edits.append(Swap(site.owner, site.name, Rotary(module), beside=stack.weight))  # stays in fp32
    says_layers = any(isinstance(edit, Entry) and edit.name == LAYERS for edit in edits)
    return edits if says_layers else [*edits, Entry(stack.config, LAYERS, 0)]


def layer_list_faults(
    stack: Stack, groups: list[Group], patched: list[Group], effects: Effects, original: Mapping[str, Any]
) -> list[str]:
    """Where layers do not rotate as the plan means, or the list does not say so."""
    flags, attribute = _flags(patched, effects, original[BY_LIST]), LISTED[stack.config.model_type]
    faults = []
    if list(stack.config.no_rope_layers) != flags:
        faults.append(f"config.no_rope_layers is {stack.config.no_rope_layers}, and the plan means {flags}")
    live = [layer.layer_idx for layer in stack.attentions if bool(getattr(layer, attribute)) != flags[layer.layer_idx]]
    if live:
        faults.append(f"layers {', '.join(map(str, live))} do not rotate as the plan means")
    turned = _groups_that_rotate(patched, effects)[:1]
    meant = {group.name: effects[group.name] for group in turned}
    if not all(isinstance(site.module, Rotary) for site in stack.rotaries):
        faults.append("the rotary module of the patch was replaced")
    return faults + rotary_faults(stack, turned or groups[:1], meant, False, original)


def rotates_nothing(group: Group) -> bool:
    """Whether the list in the config says that no layer of a group rotates."""
    attribute = LISTED.get(group.stack.config.model_type)
    return attribute is not None and not any(getattr(layer, attribute, True) for layer in group.attentions)


def _groups_that_rotate(groups: list[Group], effects: Effects) -> list[Group]:
    return [group for group in groups if effects[group.name].rotation is not None]


def _flags(groups: list[Group], effects: Effects, before: Sequence[int]) -> list[int]:
    """The list that the plan means: 1 for each layer that rotates, 0 for the others."""
    flags = list(before)
    for group in groups:
        for layer in group.attentions:
            flags[layer.layer_idx] = int(effects[group.name].rotation is not None)
    return flags


def _refuse_several(
    stack: Stack, turned: list[Group], groups: list[Group], effects: Effects, flags: Sequence[int]
) -> None:
    """Raise where layers would have to rotate by different angles."""
    meant: Any = effects[turned[0].name].rotation
    named = {id(layer) for group in groups for layer in group.attentions}
    left = any(flags[layer.layer_idx] for layer in stack.attentions if id(layer) not in named)
    one = all(effects[group.name].rotation == meant for group in turned)
    if one and left:  # layers outside the plan keep the model's own angles
        own: Any = turned[0].inv_freq
        near = torch.allclose(own.float().cpu(), torch.tensor(meant.inv_freq), rtol=1e-6)
        scaled = scaling_of(stack.rotaries[0].own, "") == meant.attention_scaling
        one = near and scaled and own_rope(turned[0])["rope_type"] not in MOVING
    if not one:
        raise UnsupportedCell("Layers rotate by different angles, and this config has one set of RoPE parameters.")


def _refuse_other_layers(stack: Stack, before: Sequence[int], flags: list[int]) -> None:
    """Raise unless a file keeps this list, and layers built from it differ only in the attribute for the list."""
    config, attribute = stack.config, LISTED[stack.config.model_type]
    changed = copy.deepcopy(config)
    changed.no_rope_layers = flags
    again = type(config).from_dict(json.loads(changed.to_json_string()))
    kept = list(again.no_rope_layers) == flags and again.layer_types == config.layer_types
    for layer in stack.attentions:
        old, new = bool(before[layer.layer_idx]), bool(flags[layer.layer_idx])
        found = {key: bool(value) for key, value in changed_values(layer, config, again).items()}
        kept &= bool(getattr(layer, attribute)) == old and found == ({("", attribute): new} if old != new else {})
    if not kept:
        raise UnsupportedCell(f"Layers of this {config.model_type!r} model that are built from its list would differ.")
