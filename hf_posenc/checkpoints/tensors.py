"""Copies files of tensors with some tensors added, left out or changed."""

from __future__ import annotations

import json
import os
import shutil

from safetensors import safe_open
from safetensors.torch import save, save_file
from torch import Tensor

ABOUT = "__metadata__"


def rewrite_tensors(
    source: str | os.PathLike[str], place: str | os.PathLike[str], tensors: dict[str, Tensor], left_out: list[str]
) -> None:
    """Copy a file of tensors with changes. Where tensors are only added, the old ones are not read."""
    with safe_open(source, framework="pt") as stored:
        names = stored.keys()
        if left_out or set(tensors) & set(names) or not _append(source, place, tensors):
            kept = {name: stored.get_tensor(name) for name in names if name not in (*tensors, *left_out)}
            save_file({**kept, **tensors}, place, metadata=stored.metadata())


def _append(source: str | os.PathLike[str], place: str | os.PathLike[str], tensors: dict[str, Tensor]) -> bool:
    """Copy a file with more tensors after the old ones; False where their alignment would be wrong."""
    added = save(tensors)
    size = 8 + int.from_bytes(added[:8], "little")
    with open(source, "rb") as old:
        header = json.loads(old.read(int.from_bytes(old.read(8), "little")))
        end = max((about["data_offsets"][1] for name, about in header.items() if name != ABOUT), default=0)
        if any(end % tensor.itemsize for tensor in tensors.values()):
            return False
        for name, about in json.loads(added[8:size]).items():
            header[name] = {**about, "data_offsets": [end + offset for offset in about["data_offsets"]]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with open(place, "wb") as new:
            new.write(len(text).to_bytes(8, "little") + text)
            shutil.copyfileobj(old, new, 1 << 24)
            new.write(added[size:])
    return True
