"""Every saved adapter carries the scheme of its base model, and is sealed against programs that would ignore it."""

from __future__ import annotations

import copy
import json
import os
import tempfile
import warnings
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from ..errors import PosencError
from ..runtime.positions import SEAL
from .fingerprint import Fingerprint, fingerprint_below

ADAPTER = "adapter_config.json"
FILE = "posenc.json"
"""The file beside `adapter_config.json` with the base model's `config.posenc` and a fingerprint of its weights."""
KIND, INSIDE, OUTSIDE = "peft_type", "hf_posenc", ("base_model_name_or_path", "revision", "task_type")
"""A sealed `adapter_config.json` names a type that PEFT does not know. Its own settings are one level deeper, where
runtimes that ignore the type do not find them. The keys that name the base model stay outside."""


class SaveWithScheme:
    """Replaces `save_pretrained` of one PEFT config object, and also writes the scheme of the model."""

    def __init__(self, config: Any, model: PreTrainedModel, once: bool = False):
        self.config, self.model, self.once = config, model, once

    def __call__(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> Any:
        if self.once:
            del self.config.save_pretrained
            if not holds_adapter_of(self.model, save_directory):
                return type(self.config).save_pretrained(self.config, save_directory, **kwargs)
        with tempfile.TemporaryDirectory() as folder:
            result = type(self.config).save_pretrained(self.config, folder, **kwargs)
            with open(os.path.join(folder, ADAPTER), encoding="utf-8") as file:
                settings = json.load(file)
        os.makedirs(save_directory, exist_ok=True)
        write_adapter(save_directory, settings, self.model)
        return result


def before_state_dict(model: Any, prefix: str, keep_vars: bool) -> None:
    """Runs before the state dict of a patched model is made, and so before adapters on it are saved.

    PEFT knows nothing about positions. Only its config objects are told where it saves. So the model gets copies of
    these objects that also write its scheme. A save that has already begun has taken its object before, and that
    object may serve other models too. So it is changed for this one save, and first checks whose adapter was saved.
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
    """Whether the adapter weights in a folder are those of this model."""
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


def seal_adapter(folder: str | os.PathLike[str], model: PreTrainedModel, weights: Fingerprint | None = None) -> None:
    """Add the scheme of its base model to the adapter that was saved in a folder, and seal it.

    `weights`: a fingerprint that was taken while the base model was in one piece.
    """
    with open(os.path.join(folder, ADAPTER), encoding="utf-8") as file:
        write_adapter(folder, json.load(file), model, weights)


def write_adapter(
    folder: str | os.PathLike[str],
    settings: dict[str, Any],
    model: PreTrainedModel,
    weights: Fingerprint | None = None,
) -> None:
    """Write the scheme of the base model first, and then the file that makes the folder an adapter."""
    found = fingerprint_below(model) if weights is None else weights
    held = quantization_settings(model)
    more = {"base": found} if found else {}
    write_json(folder, FILE, {**model.config.posenc, **more, **({"quantization": held} if held else {})})
    write_json(folder, ADAPTER, seal_settings(settings))


def quantization_settings(model: PreTrainedModel) -> dict[str, Any] | None:
    """How the base model was quantised when it was loaded, None if it was not: an adapter trained on such weights
    needs them. A checkpoint that holds quantised weights says so itself."""
    config: Any = getattr(model.config, "quantization_config", None)
    said: dict[str, Any] = {} if config is None else config if isinstance(config, dict) else config.to_dict()
    stored = getattr(getattr(model, "hf_quantizer", None), "pre_quantized", True)
    return said if said.get("quant_method") == "bitsandbytes" or (said and not stored) else None


def seal_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of an `adapter_config.json` in a form that PEFT without this package refuses."""
    if settings.get(KIND) == SEAL:
        return settings
    return {KIND: SEAL, **{key: settings[key] for key in OUTSIDE if key in settings}, INSIDE: settings}


def adapter_settings(data: dict[str, Any]) -> dict[str, Any]:
    """The settings of an `adapter_config.json`, sealed or not, in the form that PEFT knows."""
    if data.get(KIND) != SEAL:
        return data
    if not isinstance(data.get(INSIDE), dict) or KIND not in data[INSIDE]:
        raise PosencError(f"{ADAPTER} is sealed, and what it held is lost ({INSIDE!r}): it is damaged.")
    return {**data[INSIDE], **{key: data[key] for key in OUTSIDE if key in data}}


def write_json(folder: str | os.PathLike[str], name: str, data: dict[str, Any]) -> None:
    """Write the whole file or nothing: half a scheme would be worse than none."""
    path = os.path.join(folder, name)
    with open(path + ".part", "w", encoding="utf-8") as file:
        json.dump(data, file, indent=2)
        file.write("\n")
    os.replace(path + ".part", path)
