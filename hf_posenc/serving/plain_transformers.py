"""transformers as somebody has it who never heard of this package: in a process where it cannot be imported."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from ..errors import PosencError
from .readers import Prompts, Reader, Subject

PROGRAM = Path(__file__).with_name("transformers_process.py")


def version() -> str:
    return f"transformers {importlib.metadata.version('transformers')}"


def read(subject: Subject, prompts: Prompts) -> list[Tensor]:
    if not subject.path.is_dir():
        raise PosencError(f"{subject.path} is a file, and transformers reads a folder.")
    question = {"path": str(subject.path), "prompts": [list(prompt) for prompt in prompts]}
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder) / "question.json", Path(folder) / "answer.safetensors"
        asked.write_text(json.dumps(question), encoding="utf-8")
        # -I: nothing of this place, such as a clone of this package, can be imported there.
        command = [sys.executable, "-I", str(PROGRAM), str(asked), str(answered)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if done.returncode:
            said = done.stderr.strip().splitlines() or ["no reason given"]
            raise PosencError(f"transformers without hf_posenc refuses {subject.path}: {said[-1]}")
        rows = load_file(answered)["probabilities"]
    return list(rows)


READER = Reader(version, "pip install transformers", read)
