"""llama.cpp through the wheel `xllamacpp`, to check exports.

It runs in a separate process, since it may abort on a file that it cannot read.
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
"""A program that imports neither torch nor this package."""


def version() -> str | None:
    """The installed version, or None."""
    try:
        return f"{PACKAGE} {importlib.metadata.version(PACKAGE)}"
    except importlib.metadata.PackageNotFoundError:
        return None


def log_probabilities(path: Path, prompts: Sequence[Sequence[int]], vocabulary: int, visible: int) -> list[Tensor]:
    """Log-probabilities of the next token after each prompt, by llama.cpp from a GGUF file.

    `visible`: any token of plain text, not an end token or a part of a character.
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
    """The loss of each token from `first` on by llama.cpp, in nats."""
    answer = _ask({"model": str(path), "texts_of_tokens": [list(map(int, tokens))], "first": first})
    return torch.tensor(answer["losses"][0])


def token_ids(path: Path, texts: Sequence[str]) -> list[list[int]]:
    """Tokens of texts by llama.cpp, with the tokenizer of a GGUF file."""
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
    """The error message of llama.cpp, from its log."""
    lines = [line for line in log.splitlines() if "error loading model:" in line or "ASSERT" in line]
    return lines[0].partition("error loading model: ")[2] or lines[0] if lines else ""
