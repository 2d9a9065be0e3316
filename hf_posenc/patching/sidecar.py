"""Adapters carry the scheme of their base model, whoever saves them."""

from __future__ import annotations

import copy
import json
import os
import warnings
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

FILE = "posenc.json"
"""Lies beside `adapter_config.json` and holds the base model's `config.posenc`."""


class SaveWithScheme:
    """`save_pretrained` of one PEFT config object, which also writes the scheme of the model it is on."""

    def __init__(self, config: Any, model: Any, once: bool = False):
        self.config, self.model, self.once = config, model, once

    def __call__(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> Any:
        result = type(self.config).save_pretrained(self.config, save_directory, **kwargs)
        if not self.once:
            write_record(save_directory, self.model.config.posenc)
        else:
            del self.config.save_pretrained
            if holds_adapter_of(self.model, save_directory):
                write_record(save_directory, self.model.config.posenc)
        return result


def before_state_dict(model: Any, prefix: str, keep_vars: bool) -> None:
    """Runs before the state dict of a patched model is made, so before any save of adapters on it.

    PEFT knows nothing of positions: its config objects are the one thing on the model that is told where it saves. The
    model gets copies of them that know. A save that is under way has taken its object already, which may serve other
    models too: that one is told for this time only, and looks at what was saved before it believes it.
    """
    configs: Any = getattr(model, "peft_config", None)
    if configs is None and prefix.endswith("base_model."):
        warnings.warn(
            "If this saves a PEFT prompt or prefix tuning adapter: it will not carry the position scheme of its base "
            "model. Save it with hf_posenc.save.",
            stacklevel=2,
        )
    for name, config in list((configs or {}).items()):
        if isinstance(vars(config).get("save_pretrained"), SaveWithScheme):
            continue
        own = copy.copy(config)
        own.save_pretrained = SaveWithScheme(own, model)
        config.save_pretrained = SaveWithScheme(config, model, once=True)
        configs[name] = own


def holds_adapter_of(model: Any, folder: str | os.PathLike[str]) -> bool:
    """Whether the adapter weights in a folder are those of this very model."""
    live = {}
    for name, tensor in model.named_parameters():
        for adapter in model.peft_config:
            live[name.replace(f".{adapter}", "")] = tensor
    try:
        with safe_open(os.path.join(folder, "adapter_model.safetensors"), framework="pt") as stored:
            names = {key: key.removeprefix("base_model.model.") for key in stored.keys()}  # noqa: SIM118
            pairs = [
                (stored.get_tensor(key), live[name].detach().cpu()) for key, name in names.items() if name in live
            ]
    except (OSError, SafetensorError):
        return False
    return bool(pairs) and all(a.shape == b.shape and torch.equal(a, b.to(a.dtype)) for a, b in pairs)


def write_record(folder: str | os.PathLike[str], record: dict[str, Any]) -> None:
    """Write whole or not at all: a half-written scheme would be worse than none."""
    path = os.path.join(folder, FILE)
    with open(path + ".part", "w", encoding="utf-8") as file:
        json.dump(record, file, indent=2)
        file.write("\n")
    os.replace(path + ".part", path)
