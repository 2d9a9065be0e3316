"""`doctor(path)`: find out what lies there, say what it does, and run the checks for its kind."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...checkpoints.files import CONFIG
from ...checkpoints.on_disk import describe_checkpoint
from ...engines.table import RUNTIMES
from ...errors import PosencError
from ...models import model_path
from ...patching.sidecar import ADAPTER
from . import adapters, configs, gguf_files, patches, requests
from .findings import NOTE, SUSPICIOUS, WRONG, Finding, findings
from .reading import Checkpoint, read_checkpoint, refuse_giants

CONVERTED = {"model.onnx": "onnx", "model.bin": "ct2"}
"""Files that hold a whole model for a runtime. A config beside them is no more than what it was made from."""
MODULES = (adapters, configs, gguf_files, patches, requests)
"""Importing them registers their checks."""


@dataclass(frozen=True)
class Diagnosis:
    """What `doctor` answers."""

    path: str
    kind: str
    """checkpoint, adapter, gguf or serving."""
    does: str
    """What it will really do with positions."""
    findings: tuple[Finding, ...]

    @property
    def code(self) -> int:
        """0, or 1 where something is suspicious or wrong."""
        return int(any(one.level != NOTE for one in self.findings))

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "findings": [asdict(one) for one in self.findings], "code": self.code}

    def __str__(self) -> str:
        found = Counter(one.level for one in self.findings)
        counts = f"{found[WRONG]} wrong, {found[SUSPICIOUS]} suspicious, {found[NOTE]} note{'s' * (found[NOTE] != 1)}"
        parts = [f"{self.path}: {self.kind}", self.does, *map(str, self.findings), counts]
        return printable("\n\n".join(filter(None, parts)))


def printable(text: str) -> str:
    """Without what a file could do to a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in text)


def doctor(path: str | os.PathLike[str], against: str | os.PathLike[str] | None = None) -> Diagnosis:
    """Look at a checkpoint, an adapter, a GGUF file or a serving config; `against`: the checkpoint of a GGUF file."""
    place = Path(model_path(path))
    if place.is_dir():
        return _folder(place)
    if not place.is_file():
        what = "is no file and no folder" if place.exists() else "is not on this disk"
        raise PosencError(f"{place} {what}. Name a folder, a GGUF file or a serving config.")
    if place.name in (CONFIG, ADAPTER):
        return _folder(place.parent)
    with open(place, "rb") as file:
        magic = file.read(4)
    if magic == b"GGUF" or place.suffix == ".gguf":
        it = gguf_files.read_gguf(place, Path(model_path(against)) if against is not None else None)
        return Diagnosis(str(place), "gguf", _gguf(it), tuple(findings("gguf", it)))
    request = requests.read_request(place)
    if {"model_type", "architectures"} & set(request.settings):
        alone = Checkpoint(request.settings)
        return Diagnosis(str(place), "checkpoint", _does(alone), tuple(findings("checkpoint", alone)))
    return Diagnosis(str(place), "serving", _request(request), tuple(findings("serving", request)))


def _folder(folder: Path) -> Diagnosis:
    if (folder / ADAPTER).is_file():
        it = adapters.read_adapter(folder)
        found = findings("adapter", it)
        if it.base is not None:
            found += findings("checkpoint", it.base, where=f"the base {it.named}")
        return Diagnosis(str(folder), "adapter", _adapter(it), tuple(found))
    if not (folder / CONFIG).is_file():
        files = sorted(folder.glob("*.gguf"))
        if len(files) == 1:
            return doctor(files[0])
        raise PosencError(
            f"{folder} holds neither {CONFIG}, {ADAPTER} nor one GGUF file: there is nothing to look at."
        )
    for name, runtime in CONVERTED.items():
        if (folder / name).is_file() and not any(folder.glob("*.safetensors")):
            again = f"hf-posenc verify {folder} --with {runtime} --against CHECKPOINT"
            does = f"{name} for {RUNTIMES[runtime]} holds positions of its own. Whether they are those meant: {again}"
            return Diagnosis(str(folder), "checkpoint", does, ())
    checkpoint = read_checkpoint(folder)
    found = findings("checkpoint", checkpoint)
    for file in sorted(folder.glob("*.gguf")):
        try:
            found += findings("gguf", gguf_files.read_gguf(file), where=file.name)
        except (PosencError, OSError) as error:
            found.append(Finding(SUSPICIOUS, str(error), "Fetch the file again.", "gguf", file.name))
    return Diagnosis(str(folder), "checkpoint", _does(checkpoint), tuple(found))


def _does(it: Checkpoint) -> str:
    try:
        return str(it.description())
    except Exception as error:  # transformers' own checks raise whatever they like
        first = (str(error).strip().splitlines() or [""])[0]
        return f"It cannot be built as it stands: {type(error).__name__}: {first}"


def _adapter(it: adapters.Adapter) -> str:
    if it.base is None:
        return f"{it.settings.get('peft_type')} adapter on {it.named!r}"
    try:
        refuse_giants(it.base.raw)
        return str(describe_checkpoint(it.folder)[0])
    except Exception as error:
        return f"It cannot be put on its base as it stands: {type(error).__name__}: {error}"


def _gguf(it: gguf_files.Gguf) -> str:
    rotation = gguf_files.rotation_of(it)
    rows = {
        "architecture": it.header.architecture,
        "weights": it.header.dtype,
        "context length": it.number("context_length"),
        "rope theta": it.number("rope.freq_base"),
        "scaling": it.scaling,
        "factor": it.number("rope.scaling.factor"),
        "factor for each pair": "yes" if "rope_freqs.weight" in it.header.tensors else None,
        "rotates": gguf_files.stated_rotation(rotation) if rotation else "nothing",
        "held against": str(it.beside.folder) if it.beside else "nothing: no config.json beside it, or --against",
    }
    told = {name: f"{value:g}" if isinstance(value, float) else value for name, value in rows.items()}
    return "\n".join(f"{name:<22}{value}" for name, value in told.items() if value is not None)


def _request(it: requests.Request) -> str:
    known = {name: it.first(keys) for name, keys in (("model", requests.MODEL), ("tokens", requests.LENGTH))}
    known |= {f"override {name}": value for name, value in it.overrides.items()}
    return "\n".join(f"{name:<22}{value}" for name, value in known.items() if value is not None)
