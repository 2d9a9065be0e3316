"""PEFT adapters: loaded onto a base model with the positions that they were trained with, or refused."""

from __future__ import annotations

import importlib.util
import os
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import transformers
from transformers import PreTrainedModel

from ..errors import PosencError
from ..extras import require
from ..patching.fingerprint import refuse_other_weights
from ..patching.patch_state import is_patched, record_of
from ..patching.records import Record
from ..patching.sidecar import ADAPTER, FILE, adapter_settings, write_json
from .files import find, read_json
from .restore import apply_record
from .tied import is_written_once, load_tied

TASKS = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
}
"""The class of the base model for each task of an adapter."""


def load_adapter(
    path: str, load_base: Callable[..., PreTrainedModel], base: Any, hub: dict[str, Any], **kwargs: Any
) -> Any:
    """The adapter at `path` on its base model, which is loaded and patched first."""
    written = read_json(str(find(path, ADAPTER, hub)))
    adapter, file = adapter_settings(written), find(path, FILE, hub)
    if file is None and adapter is not written:
        raise PosencError(f"The adapter in {path} was trained on a patched model, and its {FILE} is lost.")
    noted = {} if file is None else read_json(file)
    record, weights = (None, {}) if file is None else adapter_record(noted)
    if find(path, "adapter_model.safetensors", hub) is None:
        raise PosencError(f"{path} holds no adapter_model.safetensors. Pickled weights are not loaded.")
    trainable, dequantized = kwargs.pop("is_trainable", False), kwargs.pop("dequantized", False)
    if isinstance(base, PreTrainedModel):
        model = base
    else:
        name = base_name(base, adapter, path)
        if kwargs.get("model_class") is None and adapter.get("task_type") in TASKS:
            kwargs["model_class"] = getattr(transformers, TASKS[adapter["task_type"]])
        if noted.get("quantization") and "quantization_config" not in kwargs:
            kwargs["quantization_config"] = quantization_config(noted["quantization"], path)
        of_adapter = ("revision", "subfolder")
        model = load_base(name, **{k: v for k, v in kwargs.items() if k not in of_adapter})
        if dequantized:
            model = dequantize_model(model, kwargs.get("dtype"))
        if record is not None and not is_patched(model):
            apply_record(model, record)
    refuse_other_positions(model, record, path)
    refuse_other_weights(model, weights, path)
    if record is not None:
        record.refuse_edited()
    peft = require("peft", "adapters", "An adapter")  # the import takes seconds, and only adapters need it
    config = peft_config(adapter, path)
    if is_written_once(path, model, adapter, hub):
        return load_tied(path, config, model, trainable, hub)
    return peft.PeftModel.from_pretrained(model, path, config=config, is_trainable=trainable, **hub)


def base_name(base: Any, adapter: dict[str, Any], path: str) -> str:
    """Where the base model of an adapter is."""
    name = os.fspath(base) if base is not None else adapter.get("base_model_name_or_path")
    if not name or not isinstance(name, str):
        raise PosencError(f"{path} does not say what its base model is ({name!r}): pass base=.")
    if os.path.isdir(name) and os.path.isdir(path) and os.path.samefile(name, path):
        raise PosencError(f"The adapter in {path} names itself as its base model: pass base=.")
    return name


def dequantize_model(model: Any, dtype: Any) -> Any:
    """The model with dequantized weights. Merged into weights of 4 bits, an adapter would be rounded away."""
    if not getattr(model, "is_loaded_in_4bit", False):
        return model
    if is_patched(model):
        raise PosencError(
            "The base model is stored patched and was held in 4 bits, which cannot be undone below a patch: merge "
            "into its whole weights (quantization_config=None), or patch the original in the recipe."
        )
    return model.dequantize(dtype=dtype)


def quantization_config(noted: dict[str, Any], path: str) -> Any:
    """The quantization of the base model that the adapter was trained on."""
    from transformers.quantizers.auto import AutoQuantizationConfig  # only such adapters need it

    method = noted.get("quant_method")
    how = "in 4 bits, by bitsandbytes" if method == "bitsandbytes" else f"quantised by {method}"
    otherwise = "To put it on whole weights, which makes another model, pass quantization_config=None."
    if method in ("bitsandbytes", "torchao") and importlib.util.find_spec(method) is None:
        raise PosencError(
            f"The adapter in {path} was trained on a base model {how}: pip install {method}. {otherwise}"
        )
    try:
        return AutoQuantizationConfig.from_dict(noted)
    except (ImportError, KeyError, TypeError, ValueError) as error:
        raise PosencError(
            f"The adapter in {path} was trained on a base model {how}, with settings that transformers cannot read "
            f"({error}). {otherwise}"
        ) from error


def adapter_record(data: dict[str, Any]) -> tuple[Record, Any]:
    """The record of the base model's patch in posenc.json, and the fingerprint of its weights."""
    return Record.from_dict(
        {key: value for key, value in data.items() if key not in ("base", "quantization")}
    ), data.get("base", {})


def peft_config(settings: dict[str, Any], path: str) -> Any:
    """PEFT's own config object for the settings of an adapter_config.json."""
    from peft import PeftConfig

    with tempfile.TemporaryDirectory() as folder:
        write_json(folder, ADAPTER, settings)
        try:
            return PeftConfig.from_pretrained(folder)
        except (KeyError, TypeError, ValueError) as error:
            raise PosencError(f"{ADAPTER} in {path} makes no adapter that PEFT knows: {error!r}.") from error


def refuse_other_positions(model: PreTrainedModel, record: Record | None, path: str) -> None:
    live = record_of(model) if is_patched(model) else None
    if record is None:
        if live is not None:
            warnings.warn(
                f"The adapter in {path} does not say which positions it was trained with; it is taken to fit the "
                f"{live.scheme.name!r} of its base model.",
                stacklevel=5,
            )
        return
    if live is None:
        raise PosencError(
            f"The adapter in {path} was trained with {record.scheme.name!r} positions, and this base model is not "
            f"patched. Patch it first, or let load do it: load({path!r})."
        )
    if live != record:
        raise PosencError(
            f"The adapter in {path} was trained with {record.scheme.name!r} {record.scheme.options()}, and this base "
            f"model is patched with {live.scheme.name!r} {live.scheme.options()}."
        )
