"""Uploads a saved checkpoint to a hub unchanged, with its card, record and seal."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import EntryNotFoundError

from .cards import CARD, is_our_text
from .files import INDEX, WEIGHTS

ARGUMENTS = ("repo_id", "token", "private", "revision", "create_pr", "commit_message", "commit_description")
"""The arguments that transformers' `save_pretrained` takes together with `push_to_hub`."""


def take_push_arguments(kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Remove the arguments about pushing from those of a save, and return them; None if nothing is to be pushed."""
    if not kwargs.pop("push_to_hub", False):
        return None
    return {key: kwargs.pop(key) for key in ARGUMENTS if key in kwargs}


def push(path: str | os.PathLike[str], names: Collection[str], where: dict[str, Any]) -> None:
    """Upload these files of a folder in one commit. A card on the hub that somebody else wrote stays."""
    api, folder = HfApi(library_name="hf_posenc", token=where.pop("token", None)), Path(os.path.realpath(path))
    made = api.create_repo(where.pop("repo_id", folder.name), private=where.pop("private", None), exist_ok=True)
    whole = any(name in (WEIGHTS, INDEX) for name in names)
    api.upload_folder(
        repo_id=made.repo_id,
        folder_path=folder,
        allow_patterns=sorted(names),
        ignore_patterns=None if _card_may_go(api, made.repo_id) else CARD,
        delete_patterns="model*.safetensors*" if whole else None,  # or loaders would prefer old weights to new shards
        commit_message=where.pop("commit_message", None) or "Upload a model with hf_posenc",
        **where,
    )


def _card_may_go(api: HfApi, name: str) -> bool:
    try:
        return is_our_text(Path(api.hf_hub_download(name, CARD)).read_text(encoding="utf-8"))
    except EntryNotFoundError:
        return True
    except UnicodeDecodeError:
        return False
