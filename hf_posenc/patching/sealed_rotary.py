"""Rotations that no config can say: rotary modules that do them all the same, and a config that nobody can build."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedCell
from ..families import Stack
from ..families.finding import RotarySite
from ..runtime.rotary import SEALED
from .rope_config import (
    Parameters,
    Rotations,
    config_with,
    keep_frequencies,
    live_frequencies,
    rope_of,
    unrelated_to_scaling,
    with_temperature,
)


def rotary_with(rotations: Rotations, site: RotarySite, stack: Stack) -> Any:
    """A copy of a family's rotary module that rotates layers of these types so, or not at all, whatever its config
    says, which is that of the stack."""
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
    """Answers a rotary module that asks its config for frequencies in each pass (PhiMoE) with those that it holds."""

    def __init__(self, module: Any):
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, float]:
        return self.module.inv_freq, self.module.attention_scaling


def sealed_parameters(stack: Stack, layer_types: Iterable[str]) -> Parameters:
    """Rope parameters that nobody can build. Phi's configs take none that they do not know; theirs stay as they were.

    The other marks of a seal are enough: these are for who forces his way past all of them.
    """
    unknown = {t: {**unrelated_to_scaling(rope_of(stack.config, t)), "rope_type": SEALED} for t in layer_types}
    return {} if isinstance(config_with(stack.config, unknown), str) else unknown


def refuse_temperature(stack: Stack, rotations: Rotations) -> None:
    """Raise where layers would read from a scheme's parameters what a sealed config does not tell them."""
    meant = {t: r.rope_parameters for t, r in rotations.items() if r is not None and r.rope_parameters}
    new = {t: {**unrelated_to_scaling(rope_of(stack.config, t)), **rope} for t, rope in meant.items()}
    if with_temperature(stack, new, rotations) != new:
        raise UnsupportedCell(
            f"Attention of this {stack.config.model_type!r} model reads mscale_all_dim by itself, and this scheme is "
            "none that its config can say. Leave mscale and mscale_all_dim out."
        )
