"""Which checkpoints are complete. A manifest is written last; one that does not match is not used."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import PosencError

FILE = "manifest.json"
NAME = re.compile(r"checkpoint-(\d+)")


def write_manifest(folder: Path, settings: dict[str, Any]) -> None:
    """Write sizes and hashes of all files of a checkpoint, and the settings of the run, atomically."""
    files = {
        str(path.relative_to(folder)): {"size": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != FILE
    }
    beside = folder / (FILE + ".part")
    with open(beside, "w", encoding="utf-8") as file:
        json.dump({"files": files, "settings": settings}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, folder / FILE)


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint; None if it is complete."""
    try:
        files = json.loads((folder / FILE).read_text(encoding="utf-8"))["files"]
        wanted = [(folder / name, int(f["size"]), str(f["sha256"])) for name, f in files.items()]
    except FileNotFoundError:
        return f"it has no {FILE}, so it was not written completely"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"its {FILE} is damaged"
    for path, size, digest in wanted:
        name = path.relative_to(folder)
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
        if sha256(path) != digest:
            return f"{name} was altered"
    return None


@dataclass(frozen=True)
class NewestCheckpoint:
    """The newest complete checkpoint, and newer ones that are damaged."""

    checkpoint: Path | None
    damaged: dict[str, str]


def newest_whole(output: Path) -> NewestCheckpoint:
    damaged: dict[str, str] = {}
    for folder in checkpoints(output):
        why = damage(folder)
        if why is None:
            return NewestCheckpoint(folder, damaged)
        damaged[folder.name] = why
    return NewestCheckpoint(None, damaged)


def checkpoints(output: Path) -> list[Path]:
    """Folders of checkpoints, newest first."""
    found = [(int(match[1]), path) for path in output.glob("checkpoint-*") if (match := NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def refuse_other_settings(
    folder: Path, settings: dict[str, Any], completed: Callable[[Any], Any] = lambda raw: raw
) -> None:
    """Raise if a run would resume with other settings than it started with.

    `complete_settings` adds to what was stored the keys that a release before this one did not know.
    """
    stored = completed(json.loads((folder / FILE).read_text(encoding="utf-8"))["settings"])
    changed = sorted(_differences(stored, json.loads(json.dumps(settings))))
    if changed:
        raise PosencError(
            f"{folder} was written by a run with other settings ({'; '.join(changed)}). Resume with the same, or "
            "begin another run with another output."
        )


def _differences(stored: Any, now: Any, name: str = "") -> list[str]:
    if isinstance(stored, dict) and isinstance(now, dict):
        keys = sorted({*stored, *now})
        return [d for k in keys for d in _differences(stored.get(k), now.get(k), f"{name}.{k}".lstrip("."))]
    return [] if stored == now else [f"{name} was {stored!r} and is {now!r}"]
