"""transformers: how a model attends, what its config and files say, and which classes stand for it."""

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
"""The attribute of a config that names how its model attends."""
INTERFACE = "ALL_ATTENTION_FUNCTIONS"
"""The name through which forwards look up the attention function that their config names."""
ROTATES = re.compile(r"apply\w*rot", re.IGNORECASE)
"""In the names that a forward uses when it rotates channels."""
ORIGIN = ("_name_or_path", "transformers_version")
"""What `config.to_dict()` says of where a config comes from, and not of the model."""


@cache
def release() -> tuple[int, int]:
    """The release of transformers that is installed, as numbers that can be compared."""
    major, minor = __version__.split(".")[:2]
    return int(major), int(minor)


def attention_of(config: Any) -> str:
    """The name of the attention that a model of this config runs. Only whole models have a public way to ask."""
    name: str = getattr(config, ATTENTION)
    return name


def set_attention(config: Any, name: str) -> None:
    """Let a model attend by another function from now on, without the checks that a public call makes."""
    setattr(config, ATTENTION, name)


def has_mask_function(attention: str) -> bool:
    """Whether masks are made for an attention of this name; without, it gets none, and padding would be seen."""
    return attention in AttentionMaskInterface._global_mapping


def own_eager(module: nn.Module) -> Any:
    """The eager attention of the model that a layer belongs to: it stands beside the layer's class."""
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
    """What config.json holds, with infinity and nan as numbers: transformers writes them in a way of its own."""
    values: dict[str, Any] = PreTrainedConfig._decode_special_floats(config)
    return values


def file_of(path: str, name: str, **hub: Any) -> str | None:
    """A file of a checkpoint on a hub, as a path; None if the checkpoint has no such file."""
    found: str | None = cached_file(path, name, _raise_exceptions_for_missing_entries=False, **hub)
    return found


def is_stateful(model: Any) -> bool:
    """Whether a model keeps a state that cannot be cut back, as recurrent ones do."""
    return bool(getattr(model, "_is_stateful", False))


def carries_adapters(model: Any) -> bool:
    """Whether adapters were put into a model, by PEFT or through transformers' own calls of it."""
    return hasattr(model, "peft_config") or bool(getattr(model, "_hf_peft_config_loaded", False))


def auto_classes(model: Any) -> list[str]:
    """The names of the auto classes that make models of this class."""
    from transformers.models.auto import modeling_auto

    name, found = type(model).__name__, []
    for auto in vars(modeling_auto).values():
        mapping = getattr(auto, "_model_mapping", None) if isinstance(auto, type) else None
        if mapping is not None and mapping._model_mapping.get(model.config.model_type) == name:
            found.append(auto.__name__)
    return sorted(found)
