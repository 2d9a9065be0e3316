"""The rotary site: modules that rotate q and k before attention, and what the config says of them."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch

from ..core.effects import Effect, Geometry, Span
from ..families import Group, Stack
from ..families.finding import RotarySite
from ..runtime.rotary import SEALED, STILL, Rotary
from .edits import Edit, Swap
from .layers import layer_edits, layer_faults
from .other_readers import entries_for_none, entries_for_others
from .own_temperature import tempered_parameters
from .rope_config import (
    Effects,
    build_rotary,
    fixed_rotation,
    live_frequencies,
    own_rope,
    rope_of,
    rope_parameters_with,
    rotary_from,
    scaling_of,
    unrelated_to_scaling,
)
from .sealed_rotary import refuse_temperature, rotary_with, sealed_parameters

SCALED = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
"""Scaled as far as any layer that reads it by itself could care."""
MOVING = ("dynamic", "longrope")
"""transformers' own types of RoPE whose frequencies change with each call."""


def rotary_edits(
    stack: Stack,
    groups: list[Group],
    effects: Effects,
    geometries: Mapping[str, Geometry],
    reach: Span,
    sealed: bool,
    rescales: bool,
) -> list[Edit]:
    """Rotary modules that rotate as the scheme means, and the rope parameters that say so: the same, to whoever loads
    them. Where those cannot say it, a `rope_type` that nobody knows.

    Layers that read those parameters by themselves do as layers that are built from them. But where a scheme
    `rescales` a RoPE that is scaled already, they stay as they are, and the parameters must say so.
    """
    ropes = [geometries[group.name].rope or {} for group in groups]
    rotations = {group.layer_type: fixed_rotation(effects[group.name]) for group in groups}
    edits: list[Edit] = []
    if sealed:
        refuse_temperature(stack, rotations)
        parameters = sealed_parameters(stack, rotations)
        modules = [rotary_with(rotations, site, stack) for site in stack.rotaries]
    else:
        extended = rescales and any(rope.get("rope_type", "default") != "default" for rope in ropes)
        parameters, config, modules, changes = build_rotary(stack, groups, effects, geometries, reach, extended)
        edits += layer_edits(stack, changes, config)
    parameters = tempered_parameters(parameters, groups, effects)
    edits += [Swap(stack.config, "rope_parameters", rope_parameters_with(stack.config.rope_parameters, parameters))]
    if list(parameters) == [""] and sealed:
        edits += entries_for_none(stack.config)
    elif list(parameters) == [""]:
        edits += entries_for_others(stack.config, parameters[""], rotations[""], reach.target)
    for site, module in zip(stack.rotaries, modules, strict=True):
        device = next(iter(site.module.buffers())).device
        # Ours stays in fp32 when the model is cast, and so cannot tell the family's own one that it was.
        edits.append(Swap(site.owner, site.name, Rotary(module.to(device), tells=sealed), beside=stack.weight))
    return edits


# --- whether it is still done ----------------------------------------------------------------------------------------


def rotary_faults(
    stack: Stack, groups: list[Group], effects: Effects, sealed: bool, original: Mapping[str, Any]
) -> list[str]:
    """`groups`: all of the stack; `effects`: by group of layers that is patched, empty on a model that is not;
    `original`: the values of the config that a patch replaced."""
    if not stack.rotaries:
        return []
    faults: list[str] = []
    by_type = {group.layer_type: group for group in groups}
    for site in stack.rotaries:
        if effects and not isinstance(site.module, Rotary):
            faults.append("the rotary module of the patch was replaced")
        for layer_type in site.buffers:
            group = by_type[layer_type]
            faults += _frequency_faults(group, site, effects.get(group.name), sealed)
    faults += _layer_faults(stack, original.get("rope_parameters") if sealed else None)
    return list(dict.fromkeys(faults))


def _layer_faults(stack: Stack, original: dict[str, Any] | None) -> list[str]:
    """Layers that have not read the rope parameters of their config, or of the original where those are sealed."""
    config = copy.deepcopy(stack.config)
    if original is not None:
        config.rope_parameters = copy.deepcopy(original)
    types = sorted({t for site in stack.rotaries for t in site.buffers})
    plain = {t: {**unrelated_to_scaling(rope_of(config, t)), "rope_type": "default"} for t in types}
    scaled = {t: {**rope, **SCALED} for t, rope in plain.items()}
    others = [copy.deepcopy(config), copy.deepcopy(config)]
    for other, new in zip(others, (plain, scaled), strict=True):
        other.rope_parameters = rope_parameters_with(config.rope_parameters, new)
    return layer_faults(stack, config, others)


def _frequency_faults(group: Group, site: RotarySite, effect: Effect | None, sealed: bool) -> list[str]:
    layer_type, kind, buffer = group.layer_type, own_rope(group)["rope_type"], site.buffers[group.layer_type]
    if effect is None and kind in MOVING:
        buffer = f"{layer_type}_original_inv_freq" if layer_type else "original_inv_freq"
    live = getattr(site.own, buffer).float().cpu()
    wanted = live
    if effect is not None:
        rotation = fixed_rotation(effect)
        wanted = torch.zeros(len(live)) if rotation is None else torch.tensor(rotation.inv_freq)
    if not torch.allclose(live, wanted, rtol=1e-5, atol=STILL):
        return ["the rotation is not switched off" if sealed else "the live frequencies are not those of the scheme"]
    if sealed:  # such a config cannot be built anew by transformers; layers that are left alone are as they were
        marked = effect is None or kind == SEALED or not sealed_parameters(group.stack, [layer_type])
        return [] if marked else ["the config does not say that its rotation is sealed"]
    fresh = rotary_from(group.stack.config, site.own)
    half = live_frequencies(site, layer_type).dtype != torch.float32
    faults, new = [], getattr(fresh, site.buffers[layer_type], torch.zeros(0)).to(live.device)
    if new.shape != live.shape or not torch.allclose(new, live, rtol=1e-2 if half else 1e-5, atol=STILL):
        faults.append(
            f"config.rope_parameters ({kind!r}) means other frequencies than the live rotary module has; a config "
            "edited after construction changes nothing, use patch_model"
        )
    meant, scaling = scaling_of(fresh, layer_type), scaling_of(site.own, layer_type)
    if not math.isclose(meant, scaling, rel_tol=1e-5):
        faults.append(f"the config means an attention scale of {meant:g}, the live module has {scaling:g}")
    return faults
