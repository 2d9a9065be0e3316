"""Rotations that no config can say. The rotary modules do them all the same, from a config that nobody can build."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedCell
from ..families import Group, Stack
from ..families.places import RotarySite
from .edits import Edit, Swap
from .other_readers import entries_for_none
from .own_temperature import parameters_with_beta
from .rotary_site import (
    Effects,
    Rotations,
    fixed_rotation,
    keep_frequencies,
    live_frequencies,
    module_edits,
    parameters_to_keep,
    rope_of,
    rope_parameters_with,
    sealed_parameters,
    with_temperature,
)


def sealed_rotary_edits(stack: Stack, groups: list[Group], effects: Effects) -> list[Edit]:
    """Puts rotary modules that rotate as the scheme means, and rope parameters whose `rope_type` nobody knows."""
    rotations = {group.layer_type: fixed_rotation(effects[group.name]) for group in groups}
    refuse_temperature(stack, rotations)
    parameters = parameters_with_beta(sealed_parameters(stack, rotations), groups, effects)
    modules = [rotary_with(rotations, site, stack) for site in stack.rotaries]
    new = rope_parameters_with(stack.config.rope_parameters, parameters)
    edits: list[Edit] = [Swap(stack.config, "rope_parameters", new)]
    if list(parameters) == [""]:
        edits += entries_for_none(stack.config)
    return edits + module_edits(stack, modules, True)


def rotary_with(rotations: Rotations, site: RotarySite, stack: Stack) -> Any:
    """A copy of a family's rotary module with these rotations, whatever its config says. None means no rotation."""
    own = site.own
    copied = copy.deepcopy(own, {id(stack.root.config): stack.config})
    for layer_type, rotation in rotations.items():
        live = live_frequencies(site, layer_type)
        values = torch.tensor(rotation.inv_freq) if rotation else torch.zeros(len(live))
        prefix = f"{layer_type}_" if layer_type else ""
        for buffer in (site.buffers[layer_type], f"{prefix}original_inv_freq"):
            if hasattr(copied, buffer):
                setattr(copied, buffer, values.to(live.device, copy=True))
        if hasattr(copied, f"{prefix}attention_scaling"):
            setattr(copied, f"{prefix}attention_scaling", rotation.attention_scaling if rotation else 1.0)
        elif rotation is not None and rotation.attention_scaling != 1.0:
            raise UnsupportedCell(f"{type(own).__name__} cannot scale attention, which this scheme does.")
    if hasattr(copied, "rope_type"):
        keep_frequencies(copied, rotations)
    if hasattr(copied, "rope_init_fn"):
        copied.rope_init_fn, copied.config = OwnFrequencies(copied), copy.copy(own.config)
        copied.config.rope_parameters = {**own.config.rope_parameters, "rope_type": "default"}
    return copied


class OwnFrequencies:
    """Gives a rotary module that computes frequencies from its config in each pass (PhiMoE) those that it holds."""

    def __init__(self, module: Any):
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, float]:
        return self.module.inv_freq, self.module.attention_scaling


def refuse_temperature(stack: Stack, rotations: Rotations) -> None:
    """Raise where layers need something from the scheme's parameters that a sealed config cannot hold."""
    meant = {t: r.rope_parameters for t, r in rotations.items() if r is not None and r.rope_parameters}
    new = {t: {**parameters_to_keep(rope_of(stack.config, t)), **rope} for t, rope in meant.items()}
    if with_temperature(stack, new, rotations) != new:
        raise UnsupportedCell(
            f"Attention of this {stack.config.model_type!r} model reads mscale_all_dim by itself, and this scheme is "
            "none that its config can say. Leave mscale and mscale_all_dim out."
        )
