"""`export(..., to="onnx")`: a checkpoint as `model.onnx`, proved in onnxruntime at lengths that were not traced."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

from ...checkpoints.cards import stays_behind
from ...checkpoints.files import CONFIG, WEIGHTS, read_json
from ...checkpoints.load import load
from ...errors import PosencError
from ...models import model_path
from ...patching.seal import MARKS
from ..onnx_reader import READER
from ..proof import Proof, prove
from ..readers import Subject
from .write import write_onnx


def export_onnx(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> Proof | None:
    """Write the checkpoint at `source` as a folder with an ONNX graph; what onnxruntime reads differently is not left.

    A decoder whose positions are RoPE or a table gets a KV cache; one that works inside attention reads whole texts.
    """
    origin, place = Path(model_path(os.fspath(source))), Path(target)
    if place.exists():
        raise PosencError(f"{place} exists already. Name another folder, or remove it first.")
    model = load(origin).float().eval()
    stage = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.absolute().parent))
    try:
        write_onnx(model, stage)
        _copy(origin, stage)
        version = READER.version()
        proof = None
        if version is not None:
            subject = Subject(stage, origin, model)
            proof = prove(model, lambda prompts: READER.read(subject, prompts), version, "f32")
            if not proof.holds:
                raise PosencError(f"Nothing is written: {proof}.")
            proof.write(stage / "proof.onnx.json")
        stage.chmod(0o755)
        os.replace(stage, place)
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return proof


def _copy(origin: Path, folder: Path) -> None:
    """The tokenizer and the config, without what speaks of weights that are not there, or of the folder itself."""
    for file in origin.iterdir():
        weights = file.name.startswith(WEIGHTS.partition(".")[0])
        if file.is_file() and not weights and file.name != CONFIG and not stays_behind(file):
            shutil.copy2(file, folder / file.name)
    raw = {key: value for key, value in read_json(str(origin / CONFIG)).items() if key not in ("posenc", *MARKS)}
    (folder / CONFIG).write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n", encoding="utf-8")
