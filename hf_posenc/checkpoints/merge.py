"""`merge`: an adapter and its base as one checkpoint that stands alone."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import PreTrainedModel

from ..errors import PosencError
from ..families import places
from ..models import model_path
from ..patching.checks import check_model
from ..patching.sidecar import ADAPTER
from ..patching.sizes import config_length
from .cards import MERGED, card_to_keep, write_card
from .files import find
from .load import load
from .save import write
from .staging import refuse_target, stage_files
from .tokenizers import tokenizer_of


def merge(
    adapter: str | os.PathLike[str], out: str | os.PathLike[str], *, overwrite: bool = False, **kwargs: Any
) -> PreTrainedModel:
    """Write the base model with an adapter merged into it as one self-contained checkpoint, and return it.

    The weights of a base in 4 bits are written dequantized. A tokenizer of the adapter or its base is copied,
    with its length updated. `overwrite` lets the checkpoint replace another one in `out`, but never the adapter or its
    base.
    """
    refuse_target(out, overwrite, adapter=model_path(adapter))
    if find(model_path(adapter), ADAPTER, {}) is None:
        raise PosencError(f"{adapter} holds no adapter to merge: it has no {ADAPTER}.")
    adapted = load(adapter, dequantized=True, **kwargs)  # merged into 4 bits, an adapter would be rounded away
    named = adapted.peft_config["default"].base_model_name_or_path
    refuse_target(out, overwrite, base=adapted.get_base_model().name_or_path)
    model: PreTrainedModel = adapted.merge_and_unload()
    untie(model)
    tokenizer = tokenizer_of(os.fspath(adapter), named)
    check_model(model)
    kept = card_to_keep(out)
    with stage_files(out, kept=kept) as folder:
        write(model, model, folder, False, {})
        if not kept:
            write_card(folder, named, MERGED)
        if tokenizer is not None:
            tokenizer.model_max_length = config_length(places(model)) or tokenizer.model_max_length
            tokenizer.save_pretrained(folder)
    return model


def untie(model: PreTrainedModel) -> None:
    """Separate shared parameters of a model whose config says that nothing is tied, so that all of them are saved.

    PEFT unties embeddings that were trained, but not other modules that share their memory.
    """
    if getattr(model.config, "tie_word_embeddings", True):  # vision models have nothing to tie
        return
    seen: set[int] = set()
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if id(parameter) in seen:
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, torch.nn.Parameter(parameter.detach().clone()))
        seen.add(id(parameter))
