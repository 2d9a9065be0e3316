"""llama.cpp itself, through the wheel `xllamacpp`, to prove what was written.

It runs in a process of its own: where it meets a file that it cannot use it may abort, and take its process along.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import PosencError

PACKAGE = "xllamacpp"
PROGRAM = Path(__file__).with_name("llama_cpp_process.py")
"""Imports neither torch nor this package."""


def version() -> str | None:
    """Which llama.cpp is installed here, if any."""
    try:
        return f"{PACKAGE} {importlib.metadata.version(PACKAGE)}"
    except importlib.metadata.PackageNotFoundError:
        return None


def log_probabilities(path: Path, prompts: Sequence[Sequence[int]], vocabulary: int, visible: int) -> list[Tensor]:
    """Of the token that follows each prompt, as llama.cpp computes them from a GGUF file, over the whole vocabulary.

    `visible`: a token that stands for text, not for an end or a part of a character.
    """
    asked = [list(map(int, prompt)) for prompt in prompts]
    answer = _ask({"model": str(path), "prompts": asked, "vocabulary": vocabulary, "visible": visible})
    found = []
    for pairs in answer["probabilities"]:
        row = torch.full((vocabulary,), -torch.inf)
        row[torch.tensor([i for i, _ in pairs])] = torch.tensor([p for _, p in pairs])
        found.append(row)
    return found


def token_losses(path: Path, tokens: Sequence[int], first: int) -> Tensor:
    """What each token from `first` on costs llama.cpp, in nats, after those before it."""
    answer = _ask({"model": str(path), "texts_of_tokens": [list(map(int, tokens))], "first": first})
    return torch.tensor(answer["losses"][0])


def token_ids(path: Path, texts: Sequence[str]) -> list[list[int]]:
    """Texts as llama.cpp cuts them with the tokenizer of a GGUF file."""
    ids: list[list[int]] = _ask({"model": str(path), "texts": list(texts)})["ids"]
    return ids


def _ask(question: dict[str, Any]) -> dict[str, Any]:
    if version() is None:
        raise PosencError(f"llama.cpp is not installed here: pip install {PACKAGE}.")
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder) / "question.json", Path(folder) / "answer.json"
        asked.write_text(json.dumps(question), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, str(PROGRAM), str(asked), str(answered)], capture_output=True, text=True, errors="replace"
        )
        file, said = Path(question["model"]).name, _reason(done.stderr + done.stdout)
        if not answered.exists():
            raise PosencError(f"llama.cpp ends while it reads {file} ({done.returncode}): {said}")
        answer: dict[str, Any] = json.loads(answered.read_text(encoding="utf-8"))
    if "error" in answer:
        raise PosencError(f"llama.cpp refuses {file}: {said or answer['error']}")
    return answer


def _reason(log: str) -> str:
    """What llama.cpp itself says is wrong with a file."""
    lines = [line for line in log.splitlines() if "error loading model:" in line or "ASSERT" in line]
    return lines[0].partition("error loading model: ")[2] or lines[0] if lines else ""
