"""Adapters with tied embeddings and output layer: these weights are saved once, and loaded into both.

PEFT saves them under two names, which for a small model is most of the file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from ..errors import PosencError
from ..models import model_path
from .files import find

FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."


def write_once(folder: Path, model: PreTrainedModel) -> None:
    """Remove the second copy of tied weights from an adapter that was just saved. `model`: the one inside PEFT's."""
    output = output_key(model)
    source = folder / FILE
    state = load_file(source)
    if output is None or output not in state:
        return
    embeddings = PREFIX + _name(model, model.get_input_embeddings()) + ".weight"
    if embeddings not in state or not state[embeddings].equal(state[output]):
        return
    del state[output]
    beside = source.with_suffix(".part")
    save_file(state, beside, metadata={"format": "pt"})
    os.replace(beside, source)


def is_written_once(path: str, model: PreTrainedModel, adapter: dict[str, Any], hub: dict[str, Any]) -> bool:
    """Whether this adapter holds tied weights once, while PEFT expects them twice."""
    output = output_key(model)
    if not adapter.get("ensure_weight_tying") or output is None:
        return False
    with safe_open(str(find(path, FILE, hub)), framework="pt") as stored:
        return output not in stored.keys()  # noqa: SIM118


def load_tied(path: str, config: Any, model: PreTrainedModel, trainable: bool, hub: dict[str, Any]) -> Any:
    """The adapter on its base model, as PEFT would load it if the tied weights had been saved twice."""
    from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict  # takes seconds

    base, revision = config.base_model_name_or_path, config.revision
    config.inference_mode = not trainable
    config.base_model_name_or_path = None  # otherwise PEFT warns that it takes the name of `model` instead
    wrapped = get_peft_model(model, config)
    config.base_model_name_or_path = base and model_path(base)  # PEFT would ask the hub for `tiny`
    state = load_file(str(find(path, FILE, hub)))
    wanted = get_peft_model_state_dict(wrapped)
    config.base_model_name_or_path, config.revision = base, revision
    places = {wanted[key].data_ptr(): key for key in wanted if key in state}
    for key in [key for key in wanted if key not in state]:
        twin = places.get(wanted[key].data_ptr())
        if twin is None:
            raise PosencError(f"The adapter in {path} lacks {key}: it is not whole.")
        state[key] = state[twin]
    set_peft_model_state_dict(wrapped, state)
    if not trainable:
        wrapped.requires_grad_(False).eval()
    return wrapped


def output_key(model: PreTrainedModel) -> str | None:
    """PEFT's name for the output layer of a model with tied embeddings; None for other models."""
    layer = model.get_output_embeddings() if getattr(model.config, "tie_word_embeddings", False) else None
    return None if layer is None else PREFIX + _name(model, layer) + ".weight"


def _name(model: PreTrainedModel, module: Any) -> str:
    return next(name for name, found in model.named_modules() if found is module)
