"""Directories that appear whole or not at all."""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import PosencError

OURS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "posenc.json", "*.part")
"""Files of an old checkpoint that are not carried into the new one."""


@contextmanager
def staged(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A folder to fill, which takes the place of `path` when the block ends well.

    Whatever happens before that (an error, a full disk, a kill) leaves what was at `path` as it was. Files there that
    are no part of a checkpoint, such as a README, are kept.
    """
    target = Path(os.path.realpath(path))  # a link stays one
    if target.exists() and not target.is_dir():
        raise PosencError(f"{path} is a file; give the directory to write to.")
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield folder
        _finish(folder, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _finish(folder: Path, target: Path) -> None:
    folder.chmod(0o755)  # mkdtemp is for one user's eyes
    if not target.exists():
        folder.rename(target)
        return
    for old in target.iterdir():
        if not (folder / old.name).exists() and not any(old.match(pattern) for pattern in OURS):
            shutil.copytree(old, folder / old.name) if old.is_dir() else shutil.copy2(old, folder / old.name)
    if not _exchange(folder, target):  # where the system cannot swap two folders at once, the old one steps aside
        aside = folder.with_name(folder.name + ".old")
        target.rename(aside)
        folder.rename(target)
        shutil.rmtree(aside, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two directories in one step (Linux); False where that is not to be had."""
    swap, here = 2, -100  # RENAME_EXCHANGE, AT_FDCWD
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    return bool(rename(here, os.fsencode(one), here, os.fsencode(other), swap) == 0)
