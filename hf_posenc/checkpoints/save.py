"""`save`: a model is written so that `load` gives it back exactly."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..compat.models import carries_adapters
from ..errors import PosencError
from ..patching.checks import check_model
from ..patching.embedders import inner_model
from ..patching.patch_state import is_patched
from ..patching.sidecar import ADAPTER, seal_adapter
from ..runtime.rotary import hush_transformers
from .cards import card_to_keep, write_card
from .files import CONFIG, weight_files
from .portable import write_portable
from .push import push, take_push_arguments
from .staging import refuse_target, stage_files


def save(model: Any, path: str | os.PathLike[str], *, portable: bool = False, **kwargs: Any) -> None:
    """Write a model, a SentenceTransformer or the adapters of a PEFT model, so that `load` gives it back.

    It replaces an older checkpoint in that directory, and nothing else there. `portable` adds a short module through
    which `from_pretrained(..., trust_remote_code=True)` loads a sealed model wherever this package is installed.
    `kwargs` go to `save_pretrained`; `push_to_hub=True` and `repo_id` push the written files as they are.
    """
    adapted = hasattr(model, "get_base_model")  # the import of peft, which would tell as well, takes seconds
    base = inner_model(model.get_base_model() if adapted else model)
    if not isinstance(base, PreTrainedModel):
        raise PosencError(
            f"save takes a transformers model, a SentenceTransformer or a PeftModel, got {type(model).__qualname__}."
        )
    if not adapted and is_patched(base):
        check_model(base)
    if adapted or carries_adapters(base):
        refuse_target(path, True, base=base.name_or_path)  # or the adapter would name itself as its base
    where = take_push_arguments(kwargs)
    if not kwargs.get("is_main_process", True):  # this process helps to gather the weights, and writes nothing
        model.save_pretrained(path, **kwargs)
        return
    kept = card_to_keep(path)
    with stage_files(path, kept=kept) as folder:
        write(model, base, folder, portable, kwargs)
        if not kept:
            write_card(folder, base.name_or_path)
        names = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]
    if where is not None:
        push(path, names, where)


def write(model: Any, base: PreTrainedModel, folder: Path, portable: bool, kwargs: dict[str, Any]) -> None:
    """Fill a folder with a checkpoint of `model`, whose transformers model is `base`."""
    adapted = model is not base and hasattr(model, "get_base_model")
    with warnings.catch_warnings(), hush_transformers():
        if adapted:  # the warning is for adapters that are saved without their scheme; `seal_adapter` adds it here
            warnings.filterwarnings("ignore", message="If this saves a PEFT")
        model.save_pretrained(folder, **kwargs)
    if adapted and is_patched(base):
        for config in folder.glob(f"**/{ADAPTER}"):
            seal_adapter(config.parent, base)
    if (folder / CONFIG).exists():
        weight_files(str(folder), {})  # raises where `kwargs` asked for a format that cannot be loaded
    if portable and not adapted:
        write_portable(folder, base)
