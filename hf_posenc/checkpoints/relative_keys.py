"""BERT models of transformers 4 with relative keys, which are loaded with their old logits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from ..errors import PosencError, UnsupportedModel
from ..patching.checks import check_model
from ..patching.relative_keys import patch_relative_keys, relative_keys_scheme

VECTORS = "distance_embedding.weight"


def has_relative_keys(raw: Mapping[str, Any]) -> bool:
    return relative_keys_scheme(raw) is not None


def with_relative_keys(
    model: PreTrainedModel, raw: Mapping[str, Any], files: Mapping[str, str], where: str
) -> PreTrainedModel:
    """The model with the vectors for distances from its files. `files`: the file of each tensor."""
    names = sorted((name for name in files if name.endswith(VECTORS)), key=_numbers)
    if any("crossattention" in name for name in names):
        raise UnsupportedModel(f"{where} has relative keys between a decoder and an encoder, which are not served.")
    scheme = relative_keys_scheme(raw)
    assert scheme is not None
    patch_relative_keys(model, scheme)
    base: Any = model.base_model
    keys = base.posenc_bias.keys
    if len(names) != len(keys):
        raise PosencError(f"{where} holds {VECTORS} of {len(names)} layers, and has {len(keys)}: it is not whole.")
    for layer, name in zip(keys, names, strict=True):
        with safe_open(files[name], framework="pt") as stored:
            vectors = stored.get_tensor(name)
        if vectors.shape != layer.shape:
            raise PosencError(f"{name!r} in {where} has shape {tuple(vectors.shape)}, not {tuple(layer.shape)}.")
        with torch.no_grad():
            layer.copy_(vectors.flip(0))  # transformers 4 counted query - key
    check_model(model)
    return model


def _numbers(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name)]
