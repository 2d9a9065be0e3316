"""The model inside its wrappers, and what it carries of its patch."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..compat.models import carries_adapters
from ..compat.pytorch import is_compiled, unwrap_compiled
from ..errors import UnsupportedModel
from ..runtime.positions import Link
from .edits import Journal
from .embedders import inner_model
from .records import Record


def unwrap_model(model: Any) -> PreTrainedModel:
    """The transformers model inside a PEFT or compiled one, or in a SentenceTransformer."""
    model = unwrap_compiled(model)
    if not isinstance(model, PreTrainedModel):
        model = inner_model(model)
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
    refuse_strangers(model)
    inner: PreTrainedModel = model
    return inner


def refuse_strangers(model: Any) -> None:
    """Raise where this is not a transformers model."""
    if not isinstance(model, PreTrainedModel):
        inner = getattr(model, "module", None)
        hint = " Patch model.module before it is wrapped." if isinstance(inner, PreTrainedModel) else ""
        hint = " Load it first: hf_posenc.load(path)." if isinstance(model, str | os.PathLike) else hint
        raise UnsupportedModel(
            "A transformers PreTrainedModel or a SentenceTransformer is wanted, got "
            f"{type(model).__module__}.{type(model).__qualname__}.{hint}"
        )


def model_to_patch(model: Any) -> PreTrainedModel:
    """The transformers model that a patch is for. Raises where it cannot be patched."""
    inner: PreTrainedModel = model if isinstance(model, PreTrainedModel) else inner_model(model)
    refuse_unpatchable(inner)
    return inner


def refuse_unpatchable(model: Any) -> None:
    """Raise for adapters, compiled models and models without weights, which cannot be patched."""
    if carries_adapters(model):
        raise UnsupportedModel(
            f"{type(model).__name__} carries PEFT adapters. Patch the base model first, then wrap it: "
            "patch_model(base, ...); get_peft_model(base, ...)."
        )
    if is_compiled(model):
        raise UnsupportedModel("This is a compiled model. Patch the model first, then torch.compile it.")
    refuse_strangers(model)
    meta = [name for name, p in model.named_parameters() if p.device.type == "meta"]
    if meta:
        raise UnsupportedModel(
            f"{len(meta)} parameters of this model are on the meta device ({meta[0]}, ...), so that it has no weights "
            "to work with. Load the weights first (without device_map offloading to 'meta'), then patch."
        )


def is_patched(model: Any) -> bool:
    return journal_of(model if isinstance(model, PreTrainedModel) else inner_model(model)) is not None


def journal_of(model: PreTrainedModel) -> Journal | None:
    """The journal that can undo a model's patch; None if the model is not patched."""
    return getattr(model.base_model, "posenc_journal", None)


def record_of(model: PreTrainedModel) -> Record | None:
    """The record of its patch in a model's config; None if there is none."""
    data = getattr(model.config, "posenc", None)
    return None if data is None else Record.from_dict(data)


def links(modules: Iterable[nn.Module]) -> list[tuple[Any, Link]]:
    """The attention layers in which a patch adds a bias or a pattern, or rotates by positions of a text.

    Each comes with its link to what it shares with other layers.
    """
    found = ((module, vars(module).get("posenc_link")) for module in modules)
    return [(m, link) for m, link in found if isinstance(link, Link) and hasattr(link.root, "posenc" + link.suffix)]
