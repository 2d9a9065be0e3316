"""`verify`: check in a runtime whether it computes the same as the loaded checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..checkpoints.files import CONFIG
from ..checkpoints.load import load
from ..errors import MissingPackage, PosencError
from ..models import model_path
from ..patching.sidecar import ADAPTER
from .proof import Proof, prove, refuse_images
from .readers import Subject, reader_of

SAME, DIFFERS, DAMAGED, REFUSED, UNPROVED = "same", "differs", "damaged", "refused", "not proved here"
CODES = {SAME: 0, DIFFERS: 1, DAMAGED: 1, UNPROVED: 3, REFUSED: 4}
"""Exit codes of the command; 2 is for wrong arguments."""


@dataclass(frozen=True)
class Verification:
    """The result of a comparison."""

    verdict: str
    runtime: str
    text: str
    proof: Proof | None = None

    @property
    def code(self) -> int:
        return CODES[self.verdict]

    def to_dict(self) -> dict[str, Any]:
        figures = {**asdict(self.proof), "holds": self.proof.holds} if self.proof else None
        return {"verdict": self.verdict, "runtime": self.runtime, "text": self.text, "proof": figures}

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")


def verify(
    path: str | os.PathLike[str],
    runtime: str,
    *,
    against: str | os.PathLike[str] | None = None,
    lengths: Sequence[int] | None = None,
) -> Verification:
    """Compare what `runtime` computes from the folder or file at `path` with the model as `hf_posenc.load` gives it.

    `against`: the checkpoint that a file was made from, by default the folder of the file. `lengths`: of prompts, by
    default the trained length and the length in the config.
    """
    reader, place = reader_of(runtime), Path(model_path(path))
    source = _source(place, against)
    installed = reader.version()
    if installed is None:
        again = f"hf-posenc verify {place} --with {runtime}"
        text = f"Not proved here: {runtime} is not installed. To prove it: {reader.install}, then {again}"
        return Verification(UNPROVED, runtime, text)
    try:
        model = load(source).float().eval()
    except MissingPackage:
        raise
    except Exception as error:  # damaged files can raise anything
        return Verification(DAMAGED, installed, f"{source} cannot be loaded: {error}")
    refuse_images(model)
    subject = Subject(place, source, model)
    try:
        proof = prove(model, lambda prompts: reader.read(subject, prompts), installed, reader.dtype(subject), lengths)
    except MissingPackage as error:
        return Verification(UNPROVED, installed, f"Not proved here: {error}")
    except PosencError as error:
        return Verification(REFUSED, installed, str(error))
    return Verification(SAME if proof.holds else DIFFERS, installed, str(proof), proof)


def _source(place: Path, against: str | os.PathLike[str] | None) -> Path:
    """The folder of the checkpoint to compare with."""
    if not place.exists():
        raise PosencError(f"{place} is neither a folder nor a file on this disk.")
    source = Path(model_path(against)) if against is not None else place if place.is_dir() else place.parent
    if not any((source / name).is_file() for name in (CONFIG, ADAPTER)):
        hint = "" if against is not None else " Name the checkpoint that it was made from: --against FOLDER."
        raise PosencError(f"{source} holds neither {CONFIG} nor {ADAPTER}: there is no model to compare with.{hint}")
    return source


def proof_file(path: str | os.PathLike[str], runtime: str) -> Path:
    """The file for figures: in a folder, or beside a file."""
    place = Path(model_path(path))
    return place / f"proof.{runtime}.json" if place.is_dir() else place.with_name(place.name + ".proof.json")
