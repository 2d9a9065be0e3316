"""The rotary modules of families that have them, rebuilt from their config or switched off."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..core.effects import Rotation
from ..core.precision import apply_but_keep_fp32
from ..errors import UnsupportedCell
from ..families.finding import frequency_buffers, unwrapped

SEALED = "hf_posenc"
"""The `rope_type` of a model that RoPE does not describe. transformers does not know it, and refuses to build it."""

UNROTATED = (
    {"rope_type": "proportional", "partial_rotary_factor": 0.0},
    {"rope_type": "linear", "factor": 1e30},
)
"""transformers' words for a rotation by nothing. The first is exact, and does not fit models that rotate a part of
their channels; the second rotates them by so little that no float can tell."""
STILL = 1e-20
"""Frequencies below this rotate nothing, at any position."""

SCALING_KEYS = (
    *("rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor"),
    *("beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim"),
    *("short_factor", "long_factor", "low_freq_factor", "high_freq_factor"),
)
"""The keys of `rope_parameters` that say how RoPE is scaled; the others say what it rotates."""


class Rotary(nn.Module):
    """A family's own rotary module, with frequencies that stay in fp32."""

    wraps_rotary = True
    tells = False
    """Whether the angles carry the positions that they were made for, for attention layers that are not told."""

    def __init__(self, inner: nn.Module, tells: bool = False):
        super().__init__()
        self.inner, self.tells = inner, tells

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        angles = self.inner(*args, **kwargs)
        if self.tells and not torch.compiler.is_compiling():
            positions = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
            first: Any = angles if isinstance(angles, Tensor) else angles[0]
            first.posenc_positions = positions
        return angles

    def _apply(self, fn: Any, recurse: bool = True) -> Rotary:
        apply_but_keep_fp32(self.inner, lambda: self.inner._apply(fn))
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


@contextmanager
def hushed() -> Iterator[None]:
    """transformers cannot check the parameters of a sealed config, and says so; nobody need act on it."""

    def useful(record: logging.LogRecord) -> bool:
        return f"'rope_type'={SEALED!r}" not in record.getMessage()

    logger = logging.getLogger("transformers.modeling_rope_utils")
    logger.addFilter(useful)
    try:
        yield
    finally:
        logger.removeFilter(useful)


def frequencies(module: Any, layer_type: str) -> Tensor:
    live: Tensor = getattr(module, frequency_buffers(module)[layer_type])
    return live


def scaling_of(module: Any, layer_type: str) -> float:
    """What a rotary module multiplies cos and sin by. Modules that never do have no such attribute."""
    prefix = f"{layer_type}_" if layer_type else ""
    return float(getattr(unwrapped(module), f"{prefix}attention_scaling", 1.0))


def carried_over(rope: Mapping[str, Any]) -> dict[str, Any]:
    """What of a model's rope parameters is no scaling, such as which part of a head rotates, and so stays."""
    skipped = set(SCALING_KEYS)
    if rope.get("rope_type") == "proportional":  # there the part that rotates is the scaling
        skipped.add("partial_rotary_factor")
    if "llama_4_scaling_beta" in rope:  # which counts from there
        skipped.discard("original_max_position_embeddings")
    return {key: copy.deepcopy(value) for key, value in rope.items() if key not in skipped}


def built(module: Any, config: Any) -> Any:
    """A rotary module like this one, made anew from a config as its model would make it."""
    own = unwrapped(module)
    arguments = {"config": config}
    for name in list(inspect.signature(type(own).__init__).parameters)[1:]:
        if name not in ("config", "device") and hasattr(own, name):
            arguments[name] = getattr(own, name)
    return type(own)(**arguments)


def fixed(module: Any, layer_types: Iterable[str]) -> None:
    """Let a module keep its frequencies: none of the types that look at the length in each pass is needed."""
    for layer_type in layer_types:
        if isinstance(module.rope_type, dict):
            module.rope_type[layer_type] = "default"
        else:
            module.rope_type = "default"


def retuned(module: Any, rotations: Mapping[str, Rotation | None]) -> Any:
    """A copy of a rotary module that rotates layers of these types so, or not at all."""
    own = unwrapped(module)
    copied = copy.deepcopy(own, {id(own.config): own.config})
    for layer_type, rotation in rotations.items():
        name = frequency_buffers(copied)[layer_type]
        live = getattr(own, name)
        values = torch.tensor(rotation.inv_freq) if rotation else torch.zeros(len(live))
        prefix = f"{layer_type}_" if layer_type else ""
        for buffer in (name, f"{prefix}original_inv_freq"):
            if hasattr(copied, buffer):
                setattr(copied, buffer, values.to(live.device, copy=True))
        if hasattr(copied, f"{prefix}attention_scaling"):
            setattr(copied, f"{prefix}attention_scaling", rotation.attention_scaling if rotation else 1.0)
        elif rotation is not None and rotation.attention_scaling != 1.0:
            raise UnsupportedCell(f"{type(own).__name__} cannot scale attention, which this scheme does.")
    if hasattr(copied, "rope_type"):
        fixed(copied, rotations)
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
