"""Checkpoints of sentence embedders: the modules around the transformers model are saved and loaded with it.

sentence-transformers is an optional dependency. It is imported only to load what it saved.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..compat.embedders import embedder_around
from ..errors import PosencError
from ..extras import require
from ..patching.embedders import KIND, LIBRARY
from .files import find, read_json

MODULES, ABOUT = "modules.json", "config_sentence_transformers.json"


def holds_embedder(path: str, hub: dict[str, Any]) -> bool:
    """Whether a checkpoint is that of a SentenceTransformer."""
    if find(path, MODULES, hub) is None:
        return False
    about = find(path, ABOUT, hub)
    return about is None or read_json(about).get("model_type", KIND) == KIND


def embedder_with(inner: PreTrainedModel, path: str, hub: dict[str, Any]) -> Any:
    """The SentenceTransformer that was saved at `path`, with `inner` as its model."""
    alone = "the transformers model inside it alone can be had with model_class=transformers.AutoModel"
    require("sentence_transformers", "embed", f"{path} holds a {KIND} ({alone}), which")
    file = find(path, MODULES, hub)
    assert file is not None
    kind = _first_type(file)
    where = {new: hub[old] for old, new in PLACES.items() if old in hub}
    try:
        made = embedder_around(inner, path, kind, **where)
    except (OSError, ValueError, KeyError, TypeError, ImportError, AttributeError) as error:
        raise PosencError(f"{path} does not make a {KIND}: {error}") from error
    return made.eval()


PLACES = {
    "revision": "revision",
    "token": "token",
    "cache_dir": "cache_folder",
    "local_files_only": "local_files_only",
}
"""Arguments of `from_pretrained` that say where files come from, and what sentence-transformers calls them."""


def _first_type(file: str) -> str:
    """The class of the first module. Only the library's own Transformer can be given a model."""
    try:
        with open(file, encoding="utf-8") as stream:
            kind = json.load(stream)[0]["type"]
    except (OSError, ValueError, LookupError, TypeError):
        raise PosencError(f"{file} should list modules with their types, and does not: it is damaged.") from None
    if not (isinstance(kind, str) and kind.startswith(LIBRARY + ".") and kind.endswith(".Transformer")):
        raise PosencError(
            f"The first module of {os.path.dirname(file)} is {kind!r}, and only {LIBRARY}'s own Transformer can be "
            "loaded. model_class=transformers.AutoModel gives the transformers model alone."
        )
    return kind


def copy_modules(source: Path, folder: Path, length: int | None) -> None:
    """Copy the modules around a transformers model, and let none of them cut texts before `length`."""
    if not (source / MODULES).exists():
        return
    for found in source.glob("[0-9]*_*"):  # the library names folders of modules so
        if found.is_dir():
            shutil.copytree(found, folder / found.name)
    for file in folder.glob("sentence_*_config.json"):
        settings = read_json(str(file))
        if length is not None and settings.get("max_seq_length") is not None:
            settings["max_seq_length"] = length
            file.unlink()
            file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def copy_embedder(source: Path, folder: Path, length: int) -> None:
    """Make a model that was saved alone a SentenceTransformer again, if it came from one."""
    if (source / MODULES).exists():
        for file in (source / MODULES, source / ABOUT, *source.glob("sentence_*_config.json")):
            if file.exists():
                shutil.copy(file, folder / file.name)
        copy_modules(source, folder, length)
