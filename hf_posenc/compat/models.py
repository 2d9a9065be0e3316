"""transformers: the attention of a model, its config and files, and its auto classes."""

from __future__ import annotations

import inspect
import re
import sys
from functools import cache
from typing import Any

from torch import nn
from transformers import AttentionMaskInterface, PreTrainedConfig, __version__
from transformers.utils.hub import cached_file

ATTENTION = "_attn_implementation"
"""The config attribute that names the attention implementation."""
INTERFACE = "ALL_ATTENTION_FUNCTIONS"
"""The global name through which forwards look up their attention function."""
ROTATES = re.compile(r"apply\w*rot", re.IGNORECASE)
"""Matches the names of functions that rotate q and k, such as `apply_rotary_pos_emb`."""
ORIGIN = ("_name_or_path", "transformers_version")
"""Keys of `config.to_dict()` that say where the config comes from, and nothing about the model."""


@cache
def release() -> tuple[int, int]:
    """The major and minor version of the installed transformers."""
    major, minor = __version__.split(".")[:2]
    return int(major), int(minor)


def value_of(config: Any, name: str) -> Any:
    """A value of a config: None if it has none, the largest if layers differ in it."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # then no value is that of all layers
        return max([value_of(layer, name) or 0 for layer in config.per_layer_config])


def attention_of(config: Any) -> str:
    """The attention implementation in a config. transformers has a public way to ask only for whole models."""
    name: str = getattr(config, ATTENTION)
    return name


def set_attention(config: Any, name: str) -> None:
    """Set the attention implementation in a config, without the checks of the public call."""
    setattr(config, ATTENTION, name)


def has_mask_function(attention: str) -> bool:
    """Whether a mask function is registered for this attention. Without one it gets no mask, and padding is seen."""
    return attention in AttentionMaskInterface._global_mapping


def own_eager(module: nn.Module) -> Any:
    """The eager attention function in the module that defines the layer's class."""
    return sys.modules[type(module).__module__].eager_attention_forward


def _names_used(cls: Any) -> tuple[str, ...]:
    """The global names that a class's forward uses."""
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    return () if code is None else code.co_names


@cache
def calls_interface(cls: Any) -> bool:
    """Whether modules of a class attend through transformers' attention interface."""
    return INTERFACE in _names_used(cls)


@cache
def rotates(cls: Any) -> bool:
    """Whether modules of a class apply rotary angles to something in their forward."""
    return any(ROTATES.search(name) for name in _names_used(cls))


def decode_floats(config: dict[str, Any]) -> dict[str, Any]:
    """The values of config.json with infinities and NaN as floats, which transformers encodes in its own way."""
    values: dict[str, Any] = PreTrainedConfig._decode_special_floats(config)
    return values


def file_of(path: str, name: str, **hub: Any) -> str | None:
    """The local path of a file of a checkpoint, from a folder or a hub; None if there is no such file."""
    found: str | None = cached_file(path, name, _raise_exceptions_for_missing_entries=False, **hub)
    return found


def is_stateful(model: Any) -> bool:
    """Whether a model keeps a state that cannot be cropped, as recurrent models do."""
    return bool(getattr(model, "_is_stateful", False))


def carries_adapters(model: Any) -> bool:
    """Whether a model has adapters, added by PEFT or through transformers."""
    return hasattr(model, "peft_config") or bool(getattr(model, "_hf_peft_config_loaded", False))


def auto_classes(model: Any) -> list[str]:
    """The names of the auto classes that create models of this class."""
    from transformers.models.auto import modeling_auto

    name, found = type(model).__name__, []
    for auto in vars(modeling_auto).values():
        mapping = getattr(auto, "_model_mapping", None) if isinstance(auto, type) else None
        if mapping is not None and mapping._model_mapping.get(model.config.model_type) == name:
            found.append(auto.__name__)
    return sorted(found)
