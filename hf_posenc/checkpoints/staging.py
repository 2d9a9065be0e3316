"""New checkpoints are written beside an old one, and then replace it file by file."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import PosencError
from ..patching.sidecar import ADAPTER, FILE
from .files import CONFIG, INDEX, PROOF, WEIGHTS, read_json

if sys.platform != "win32":
    import fcntl

STAGE = ".hf_posenc-"
"""The start of the name of the folder, inside a target, in which a new checkpoint is made."""
HEADS = (ADAPTER, CONFIG)
"""Without these files no loader takes a folder for a checkpoint: they are the first to go and the last to come."""


@contextmanager
def stage_files(path: str | os.PathLike[str], kept: Collection[str] = ()) -> Iterator[Path]:
    """A folder to fill. Its files replace those at `path` when the block ends without an error.

    An error leaves everything at `path` as it was. A kill leaves the old checkpoint, the new one, or a folder without
    its config.json, which every loader refuses and the next save repairs. Of the files at `path`, only those with the
    names of new ones, the old weights and what was measured of these are removed. Files named in `kept` are written
    only where there are none.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_dir():
        raise PosencError(f"{path} is a file; give the directory to write to.")
    made = [folder for folder in (target, *target.parents) if not folder.exists()]
    target.mkdir(parents=True, exist_ok=True)
    stage = Path(tempfile.mkdtemp(prefix=STAGE, dir=target))  # inside the target, which may be on another disk
    new, old = stage / (target.name or "new"), stage / STAGE  # savers use the name of the folder
    try:
        with _lock(stage, wait=False):
            new.mkdir()
            yield new
            with _lock(target, wait=True):
                for name in kept:
                    if os.path.lexists(target / name):
                        (new / name).unlink(missing_ok=True)
                _replace(new, target, old)
                _sweep(target, stage)
    except BaseException:
        if not any(not file.is_dir() for file in old.rglob("*")):  # files that could not be moved back stay there
            shutil.rmtree(stage, ignore_errors=True)
        _remove_empty(made)
        raise
    shutil.rmtree(stage, ignore_errors=True)


def refuse_target(path: str | os.PathLike[str], overwrite: bool, **sources: str | os.PathLike[str] | None) -> None:
    """Raise where writing to `path` would destroy a source, or a checkpoint that the user did not say may go."""
    for what, source in sources.items():
        if source is not None and os.path.isdir(source) and os.path.isdir(path) and os.path.samefile(source, path):
            raise PosencError(f"{path} is the {what} itself, which is never overwritten: choose another directory.")
    if not overwrite and os.path.isdir(path) and any(not name.startswith(STAGE) for name in os.listdir(path)):
        raise PosencError(
            f"{path} is there already, and not empty: choose another directory, or say that a checkpoint in it may be "
            "replaced (overwrite=True, on the command line --overwrite)."
        )


def lost_its_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether a save into this folder was killed or is still running, and no checkpoint is left."""
    folder = Path(path)
    return not any((folder / head).exists() for head in HEADS) and any(folder.glob(STAGE + "*"))


def _replace(new: Path, target: Path, old: Path) -> None:
    """Move old files away and new files in. An error moves them all back."""
    coming = sorted((f.relative_to(new) for f in new.rglob("*") if not f.is_dir()), key=_rank)
    _refuse_blocked(target, coming)
    leaving = sorted({*coming, *_files_to_remove(target, coming)}, key=_rank, reverse=True)
    leaving = [name for name in leaving if os.path.lexists(target / name)]
    steps = [(target / name, old / name) for name in leaving] + [(new / name, target / name) for name in coming]
    made = [target / p for name in coming for p in name.parents if not (target / p).exists()]
    done: list[tuple[Path, Path]] = []
    try:
        for name in leaving:
            if name in coming and not (target / name).is_symlink():
                (new / name).chmod((target / name).stat().st_mode & 0o7777)
        for source, place in steps:
            place.parent.mkdir(parents=True, exist_ok=True)
            done.append((source, place))
            os.rename(source, place)
    except BaseException:
        for source, place in reversed(done):
            with suppress(OSError):
                if os.path.lexists(place) and not os.path.lexists(source):
                    os.rename(place, source)
        _remove_empty(made)
        raise


def _rank(name: Path) -> tuple[bool, bool, bool, str]:
    """The order in which files come: weights, other files, heads in subfolders, and last the head of the whole."""
    return name.name in HEADS, str(name) in HEADS, name.suffix != ".safetensors", str(name)


def _files_to_remove(target: Path, coming: list[Path]) -> set[Path]:
    """Old files that must go though no new file has their name, such as old weights and what was measured of them."""
    found = {name.with_name(FILE) for name in coming if name.name == ADAPTER}
    if not {Path(WEIGHTS), Path(INDEX)} & set(coming):
        return found
    found |= {Path(WEIGHTS), Path(INDEX), *(file.relative_to(target) for file in target.glob(PROOF))}
    with suppress(PosencError):  # there is no index, or it is damaged
        names = read_json(str(target / INDEX)).get("weight_map")
        shards = names.values() if isinstance(names, dict) else ()
        found |= {Path(s) for s in shards if isinstance(s, str) and Path(s).name == s and s.endswith(".safetensors")}
    return found


def _refuse_blocked(target: Path, coming: list[Path]) -> None:
    """Raise where something in a folder would hide or block the new checkpoint."""
    if Path(CONFIG) in coming and Path(ADAPTER) not in coming and (target / ADAPTER).exists():
        raise PosencError(
            f"{target} holds an adapter ({ADAPTER}), which loaders would take in place of a model written there: "
            "choose another directory, or move the adapter away."
        )
    for name in coming:
        if (target / name).is_dir():
            raise PosencError(f"{target / name} is a directory, and a file of that name is to come: move it away.")
        for parent in name.parents:
            if os.path.lexists(target / parent) and not (target / parent).is_dir():
                raise PosencError(f"{target / parent} is a file, and a folder of that name is to come: move it away.")


def _remove_empty(folders: list[Path]) -> None:
    for folder in sorted(set(folders), reverse=True):
        with suppress(OSError):
            folder.rmdir()


def _sweep(target: Path, own: Path) -> None:
    """Remove what killed saves have left."""
    for folder in target.glob(STAGE + "*"):
        if folder != own and folder.is_dir() and not folder.is_symlink():
            with _lock(folder, wait=False) as abandoned:
                if abandoned:
                    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _lock(folder: Path, wait: bool) -> Iterator[bool]:
    """Hold a lock on a folder, which ends with the process. Gives False where the lock cannot be had."""
    if sys.platform == "win32":
        yield False
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            held = True
        except OSError:  # another process holds it, or the file system has no locks
            held = False
        yield held
    finally:
        os.close(handle)
