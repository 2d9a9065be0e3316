"""Results saved to disk as they come, from which the same run can resume after an interruption."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ...compat.models import ORIGIN
from ...errors import PosencError
from ...patching.patch_state import unwrap_model
from ..measures.processes import ALONE, Processes
from ..measures.rows import Row
from ..measures.texts import Document

FORMAT = 1
SAMPLES = 64
"""How many values of each weight are in its digest."""


PROBES = ("On day 7 the cat went home.", "  x = [1, 22, 333]\n\n", "Äpfel, 漢字 and 🙂")
"""Texts whose tokens identify a tokenizer."""


def fingerprint(model: Any, tokenizer: Any, documents: Sequence[Document], options: dict[str, Any]) -> dict[str, Any]:
    """What identifies a run: model, tokenizer, texts and options."""
    return {
        "model": model_digest(model),
        "tokenizer": tokenizer_digest(tokenizer),
        "text": [[document.name, document.digest] for document in documents],  # windows depend on their order
        "options": json.loads(json.dumps(options)),
    }


def model_digest(model: Any) -> str:
    """A digest of the config and a few values of every weight: cheap, but a training step changes it."""
    config = unwrap_model(model).config.to_dict()
    for key in ORIGIN:
        config.pop(key, None)
    found = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, weight in sorted(model.named_parameters()):
        flat = weight.detach().flatten()
        taken = flat[:: max(1, flat.numel() // SAMPLES)][: 2 * SAMPLES]
        found.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        found.update(taken.to(torch.float32).cpu().numpy().tobytes())
    return found.hexdigest()[:16]


def tokenizer_digest(tokenizer: Any) -> str:
    """A digest of the class, the size, and the tokens of a few texts."""
    encoded = [list(tokenizer(text)["input_ids"]) for text in PROBES]
    return f"{type(tokenizer).__name__} {len(tokenizer)} {hashlib.sha256(repr(encoded).encode()).hexdigest()[:16]}"


class Results:
    """The rows of each job of a run, saved in a JSONL file if a path is given. Only the first process writes it."""

    def __init__(
        self, path: str | os.PathLike[str] | None, identity: dict[str, Any], shared: Processes = ALONE
    ) -> None:
        self.path = None if path is None or not shared.first else Path(path)
        self.done: dict[str, list[Row]] = {}
        shared.by_first(lambda: self._open(identity))
        self.done = shared.from_first(self.done)  # all processes must start at the same job

    def _open(self, identity: dict[str, Any]) -> None:
        if self.path is None:
            return
        if self.path.exists() and self.path.stat().st_size:
            self._read(self.path, identity)
        else:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._write({"format": FORMAT, "run": identity})

    def _read(self, path: Path, identity: dict[str, Any]) -> None:
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]  # drop a line that was cut off when the run was killed
        lines = []
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                lines.append(json.loads(line))
            except ValueError:
                raise PosencError(f"{path} is damaged at line {number}. Write to another file.") from None
        first = lines[0] if lines and isinstance(lines[0], dict) else {}
        if first.get("format") != FORMAT or not isinstance(first.get("run"), dict):
            raise PosencError(
                f"{path} is there and holds no results of this format ({FORMAT}). Write to another file."
            )
        refuse_other_run(path, first["run"], identity)
        for number, line in enumerate(lines[1:], 2):
            try:
                self.done[line["job"]] = [Row.from_dict(row) for row in line["rows"]]
            except (KeyError, TypeError):
                raise PosencError(
                    f"{path} holds no job with its rows at line {number}. Write to another file."
                ) from None
        if len(whole) < len(data):
            with path.open("r+b") as file:
                file.truncate(len(whole))

    def add(self, job: str, rows: Sequence[Row]) -> None:
        self.done[job] = list(rows)
        if self.path is not None:
            self._write({"job": job, "rows": [row.to_dict() for row in rows]})

    def _write(self, line: dict[str, Any]) -> None:
        assert self.path is not None
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())


def refuse_other_run(path: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    changed = [key for key in now if before.get(key) != now[key]]
    if changed:
        told = "; ".join(difference for key in changed for difference in differences(key, before.get(key), now[key]))
        raise PosencError(
            f"{path} holds results of another run: {', '.join(changed)} changed ({told}). Write to another file, or "
            "remove this one."
        )


def differences(key: str, before: Any, now: Any) -> list[str]:
    """What changed, down to the single setting."""
    if isinstance(before, dict) and isinstance(now, dict):
        return [
            difference
            for inner in dict.fromkeys([*before, *now])
            if before.get(inner) != now.get(inner)
            for difference in differences(inner, before.get(inner), now.get(inner))
        ]
    if key == "text" and isinstance(before, list) and isinstance(now, list):
        names, others = ([str(each[0]) for each in texts if each] for texts in (before, now))
        return [
            f"{setting_words(names)} -> {setting_words(others)}"
            if names != others
            else f"the contents of {setting_words(names)}"
        ]
    return [f"{key}: {setting_words(before)} -> {setting_words(now)}"]


def setting_words(value: Any) -> str:
    """A setting as it is typed, cut where it is long."""
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 80 else text[:80] + "..."
