"""Seals checkpoints of earlier versions as this version does."""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from safetensors import safe_open

from ..errors import PosencError
from ..patching.records import CHECKSUM, FORMAT, Record, checksum
from ..patching.seal import MARKS, NAME, Seal, has_seal, is_sealed_config
from ..patching.sidecar import ADAPTER, FILE, seal_settings, write_json
from .files import CONFIG, INDEX, find, read_json, weight_files
from .load import model_class_of
from .staging import STAGE
from .tensors import rewrite_tensors


def reseal(path: str | os.PathLike[str]) -> bool:
    """Seal the patched checkpoint or adapter in a directory as this version does; False if there is nothing to do.

    Checkpoints that any transformers loads right are not sealed. At every moment the directory holds a checkpoint that
    loads. New files are written beside the old ones and replace them one by one, and each works with old files too.
    """
    folder = Path(os.fspath(path))
    if not folder.is_dir():
        raise PosencError(f"{folder} is not a directory: a checkpoint to seal must be on this disk.")
    if (folder / ADAPTER).exists():
        return _reseal_adapter(folder)
    raw = _config(folder)
    record, files = Record.from_dict(raw["posenc"]), weight_files(str(folder), {})
    if not is_sealed_config(raw) or (record.format == FORMAT and has_seal(files)):
        return False
    record.refuse_edited()
    stage = Path(tempfile.mkdtemp(prefix=STAGE, dir=folder))
    try:
        made = _make_sealed_files(folder, stage, raw, files)
        for file in made:
            shutil.copymode(folder / file.name, file)
            os.replace(file, folder / file.name)
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return True


def _reseal_adapter(folder: Path) -> bool:
    written = read_json(str(folder / ADAPTER))
    if not (folder / FILE).exists():
        raise PosencError(f"{folder} holds an adapter of a model that was not patched: there is nothing to seal.")
    if seal_settings(written) is written:
        return False
    write_json(folder, ADAPTER, seal_settings(written))
    return True


def _config(folder: Path) -> dict[str, Any]:
    file = find(str(folder), CONFIG, {})
    raw = read_json(file) if file is not None else {}
    if "posenc" not in raw:
        raise PosencError(f"{folder} holds no patched checkpoint: there is nothing to seal.")
    return raw


def _make_sealed_files(folder: Path, stage: Path, raw: dict[str, Any], files: dict[str, str]) -> list[Path]:
    """Write new files for a checkpoint, and list them in the order in which they may replace the old ones."""
    made = []
    if not has_seal(files):
        home = min(set(files.values()), key=os.path.getsize)  # the cheapest to copy
        prefix = model_class_of(raw, None).base_model_prefix + "."
        name = f"{prefix if any(key.startswith(prefix) for key in files) else ''}{NAME}.weight"
        with safe_open(home, framework="pt") as stored:
            like = stored.get_tensor(next(iter(stored.keys())))
        made.append(stage / os.path.basename(home))
        rewrite_tensors(home, made[0], {name: Seal(like).weight}, [])
        if (folder / INDEX).exists():
            index = read_json(str(folder / INDEX))
            index["weight_map"][name] = os.path.basename(home)
            made.append(_write_json(stage / INDEX, index))
    record = {**raw["posenc"], "format": FORMAT, CHECKSUM: checksum(raw["posenc"])}
    config = {**raw, **copy.deepcopy(MARKS), "posenc": record}
    return [*made, _write_json(stage / CONFIG, config)]


def _write_json(file: Path, data: dict[str, Any]) -> Path:
    file.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return file
