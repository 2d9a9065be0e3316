"""`export(..., to="onnx")`: a checkpoint as `model.onnx`, proved in onnxruntime at lengths that were not traced."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from ...checkpoints.cards import stays_behind
from ...checkpoints.files import CONFIG, WEIGHTS, read_json
from ...checkpoints.load import load
from ...errors import PosencError, UnsupportedCell
from ...extras import require
from ...models import model_path
from ...patching.describe import describe
from ...patching.grades import SEALED
from ...patching.patch_state import record_of
from ...patching.seal import MARKS
from ...schemes import SCHEMES
from ..onnx_reader import FILE, READER
from ..proof import Proof, prove
from ..readers import Subject
from ..rotation import follows_length
from .graphs import cached_graph, whole_graph

COLOURS = re.compile(r"\x1b\[[0-9;]*m")
"""torch's exporter writes for a terminal."""


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


def write_onnx(model: Any, folder: Path) -> None:
    """The graph of a live model, in fp32, into a folder."""
    require("onnx", "onnx", "An ONNX graph")
    require("onnxscript", "onnx", "An ONNX graph")
    refuse_moving(model)
    graph = cached_graph(model) if has_cache(model) else whole_graph(model)
    level = logging.getLogger("torch.onnx").level
    try:
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            program: Any = torch.onnx.export(
                graph.module,
                graph.arguments,
                input_names=graph.inputs,
                output_names=graph.outputs,
                dynamic_shapes=graph.shapes,
                dynamo=True,
                verbose=False,
            )
        program.save(str(folder / FILE))
    except Exception as error:  # what cannot be traced fails in as many ways as there are models
        kind, scheme = type(model).__name__, describe(model).scheme
        raise UnsupportedCell(f"torch cannot export {scheme!r} on {kind} for any length: {_reason(error)}") from error
    finally:
        logging.getLogger("torch.onnx").setLevel(level)


def _reason(error: BaseException) -> str:
    """What failed first; the errors that are raised from it say only in which step that was."""
    while error.__cause__ is not None:
        error = error.__cause__
    said = COLOURS.sub("", str(error)).strip()
    return said.splitlines()[0] if said else type(error).__name__


def has_cache(model: Any) -> bool:
    """Whether a graph can be given keys and values of earlier calls: of a decoder whose attention is its own."""
    decodes = getattr(model, "can_generate", lambda: False)() and not model.config.is_encoder_decoder
    return bool(decodes) and not describe(model).portability.startswith(SEALED)


def refuse_moving(model: Any) -> None:
    """Raise for a rotation that looks at the length in each call: a graph is traced once."""
    if follows_length(model):
        record = record_of(model)
        assert record is not None
        known = SCHEMES.registered().get(record.scheme.name)  # a plan is none
        nearest = (known and known.nearest) or "ntk"
        raise UnsupportedCell(
            f"{record.scheme.name!r} chooses its angles by the length of each text, which a graph that is traced once "
            f"cannot do. The nearest scheme that can be exported is {nearest!r}."
        )


def _copy(origin: Path, folder: Path) -> None:
    """The tokenizer and the config, without what speaks of weights that are not there, or of the folder itself."""
    for file in origin.iterdir():
        weights = file.name.startswith(WEIGHTS.partition(".")[0])
        if file.is_file() and not weights and file.name != CONFIG and not stays_behind(file):
            shutil.copy2(file, folder / file.name)
    raw = {key: value for key, value in read_json(str(origin / CONFIG)).items() if key not in ("posenc", *MARKS)}
    (folder / CONFIG).write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n", encoding="utf-8")
