"""Checkpoints as folders for vLLM, SGLang, MLX and CTranslate2: the same weights with another config."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..checkpoints.cards import stays_behind
from ..checkpoints.files import CONFIG, read_json
from ..checkpoints.load import load
from ..core.effects import Rotation
from ..engines.kinds import LISTED, kind_of_rope
from ..errors import PosencError, UnsupportedCell
from ..models import model_path
from ..patching.describe import describe
from ..patching.other_readers import SCALING, SEE, THETA, foreign_keys, keys_for_others
from ..patching.patch_state import record_of
from ..patching.records import section_of, uses_layer_list
from ..schemes.frequencies import MSCALES
from .external_runtimes import CT2, EXTERNAL_RUNTIMES
from .proof import Proof, prove
from .rotation import LiveRotation, live_rotation, refuse_sealed
from .rules import rules_of


def export_folder(source: str | os.PathLike[str], target: str | os.PathLike[str], runtime: str) -> Proof | None:
    """Write the checkpoint at `source` as a folder for `runtime`, and check it there if that is installed.

    A folder that the runtime computes differently is removed.
    """
    origin, place = Path(model_path(os.fspath(source))), Path(target)
    if place.exists():
        raise PosencError(f"{place} exists already. Name another folder, or remove it first.")
    model = load(origin).eval()
    how, rotation = choose_way(model, runtime)
    stage = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.absolute().parent))
    try:
        write_folder(origin, stage, model, runtime, how, rotation)
        proof = prove_folder(model, stage, runtime)
        if proof is not None:
            proof.write(stage / f"proof.{runtime}.json")
        stage.chmod(0o755)
        os.replace(stage, place)
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return proof


def choose_way(model: Any, runtime: str) -> tuple[str, LiveRotation | None]:
    """How to write the positions of a model for a runtime; raises if that is impossible."""
    rules = rules_of(runtime)
    refuse_sealed(model, rules.runtime)
    config, found = model.config.get_text_config(), describe(model)
    rope = getattr(config, "rope_parameters", None)
    kind = kind_of_rope(rope) if rope else "table" if found.table != "none" else "own"
    if uses_layer_list(record_of(model)):
        kind = LISTED
    how = rules.how(config.model_type, kind, found.scheme)
    return how, live_rotation(model) if rope else None


def prove_folder(model: Any, folder: Path, runtime: str) -> Proof | None:
    """Compare the runtime with the live model; None if the runtime is not installed."""
    outside = EXTERNAL_RUNTIMES.get(runtime)
    version = outside.version() if outside is not None else None
    if outside is None or version is None:
        return None
    proof = prove(model.float(), lambda prompts: outside.log_probabilities(folder, prompts), version, "f32")
    if not proof.holds:
        raise PosencError(f"Nothing is written: {proof}.")
    return proof


def write_folder(
    origin: Path, folder: Path, model: Any, runtime: str, how: str, rotation: LiveRotation | None
) -> None:
    """Write the files of a checkpoint into a folder, with a config for one runtime."""
    for file in origin.iterdir():
        if file.is_file() and file.name != CONFIG and not stays_behind(file):
            shutil.copy2(file, folder / file.name)
    raw = read_json(str(origin / CONFIG))
    raw.pop("posenc", None)  # the folder needs no patch
    if rotation is not None:
        section, length = section_of(raw, None), int(model.config.get_text_config().max_position_embeddings)
        for key in foreign_keys(type(model.config.get_text_config())):
            section.pop(key, None)
        section.update(WAYS[how](model, rotation, length, runtime))
    (folder / CONFIG).write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if runtime == "ct2":
        _convert_to_ct2(folder, rotation if how == "longrope" else None)


def _saved(model: Any, rotation: LiveRotation, length: int, runtime: str) -> dict[str, Any]:
    return _keys(model, rotation, rotation.parameters, length)


def _keys(model: Any, rotation: LiveRotation, rope: dict[str, Any], length: int) -> dict[str, Any]:
    """`rope_parameters`, and keys that stop runtimes which would misread them."""
    still = max(rotation.inv_freq) <= 1e-20
    meant = None if still else Rotation(inv_freq=rotation.inv_freq, attention_scaling=rotation.attention_scaling)
    return {"rope_parameters": rope, **keys_for_others(model.config.get_text_config(), rope, meant, length)}


def _longrope(model: Any, rotation: LiveRotation, length: int, runtime: str) -> dict[str, Any]:
    """A factor for each pair. vLLM and SGLang read the attention factor; MLX computes it from two lengths."""
    scaling = rotation.attention_scaling
    factors = list(rotation.factors())
    rope: dict[str, Any] = {
        "rope_type": "longrope",
        "rope_theta": rotation.theta,
        "short_factor": factors,
        "long_factor": factors,
        "factor": 1.0,
        "attention_factor": scaling,
        **dict.fromkeys(MSCALES, scaling),
        "original_max_position_embeddings": length,
    }
    keys = _keys(model, rotation, rope, length)
    if runtime != "mlx":
        return {**keys, THETA: SEE}
    if scaling < 1:
        raise UnsupportedCell(
            f"mlx-lm cannot be told an attention factor of {scaling:g} beside a factor for each pair: it computes one "
            "that is not below 1. Patch the original model with 'yarn' and its default betas, or with 'ntk'."
        )
    original = length ** (1 / scaling**2)  # for MLX's sqrt(1 + ln(length / original) / ln(original))
    rope["original_max_position_embeddings"] = original
    return {**keys, THETA: rotation.theta, SCALING: rope, "rope_parameters": rope}


WAYS: dict[str, Callable[[Any, LiveRotation, int, str], dict[str, Any]]] = {
    "saved": _saved,
    "longrope": _longrope,
}
"""The function that makes the RoPE keys of a config, by the name in the rules."""


def _convert_to_ct2(folder: Path, rotation: LiveRotation | None) -> None:
    """Replace the weights in a folder by a CTranslate2 model, with the given rotation if any."""
    if CT2.version() is None:
        raise PosencError(
            f"Nothing is written: CTranslate2's own converter does that, and is not installed here: {CT2.install}."
        )
    with tempfile.TemporaryDirectory() as made:
        told = {"factors": rotation.factors(), "scaling": rotation.attention_scaling} if rotation else None
        done = CT2.run("--convert", str(folder), made, *([json.dumps(told)] if told else []))
        if done.returncode:
            said = done.stderr.strip().splitlines() or ["no reason given"]
            raise PosencError(f"CTranslate2's converter refuses it: {said[-1]}")
        for file in folder.glob("*.safetensors*"):
            file.unlink()
        (folder / CONFIG).unlink()
        for made_file in Path(made).iterdir():
            shutil.copy2(made_file, folder / made_file.name)
