"""Finds and reads the files of a checkpoint. Errors say what is wrong with a file."""

from __future__ import annotations

import json
import os
from typing import Any

from safetensors import SafetensorError, safe_open

from ..errors import PosencError
from ..models import model_path
from .hub import hub_file

CONFIG = "config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PROOF = "proof.*.json"
"""Files with what a runtime was measured to make of a checkpoint."""
HUB = ("revision", "token", "cache_dir", "force_download", "local_files_only", "subfolder", "proxies")
"""Arguments of `from_pretrained` that say where files come from."""


def find(path: str, name: str, hub: dict[str, Any]) -> str | None:
    """The path of a checkpoint's file, in a folder, in this package or from a hub; None if there is no such file."""
    if not os.path.isabs(path):
        path = model_path(path)
    if os.path.isdir(path):
        found = os.path.join(path, hub.get("subfolder") or "", name)
        return found if os.path.isfile(found) else None
    if os.path.exists(path) or path.startswith((".", "/", "~")):
        gone = "" if os.path.exists(path) else ": nothing of that name is there"
        raise PosencError(f"{path} is not a directory{gone}. A checkpoint is a directory with a config.json in it.")
    return hub_file(path, name, hub)


def read_json(file: str) -> dict[str, Any]:
    """A JSON object from a file."""
    try:
        with open(file, encoding="utf-8") as stream:
            data = json.load(stream)
    except (OSError, ValueError, RecursionError) as error:
        raise PosencError(f"{file} cannot be read: {error}. It is damaged, or not what its name says.") from None
    if not isinstance(data, dict):
        raise PosencError(f"{file} should hold a JSON object and holds {type(data).__name__}.")
    return data


def weight_files(where: str, hub: dict[str, Any]) -> dict[str, str]:
    """Every tensor of a checkpoint and the file that holds it."""
    index = find(where, INDEX, hub)
    if index is not None:
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not names or not all(isinstance(n, str) for n in names.values()):
            raise PosencError(f"{index} should map weights to files in 'weight_map', and does not.")
        files = {shard: find(where, shard, hub) for shard in set(names.values())}
        missing = [shard for shard, file in files.items() if file is None]
        if missing:
            raise PosencError(f"{where} lacks {', '.join(sorted(missing))}: the checkpoint is not whole.")
        return {key: str(files[shard]) for key, shard in names.items()}
    single = find(where, WEIGHTS, hub)
    if single is None:
        raise PosencError(f"{where} holds no {WEIGHTS}. Pickled weights are not loaded; convert them first.")
    try:
        with safe_open(single, framework="pt") as stored:
            return dict.fromkeys(stored.keys(), single)
    except (OSError, SafetensorError) as error:
        raise PosencError(f"{single} cannot be read: {error}. It is damaged, or not what its name says.") from None
