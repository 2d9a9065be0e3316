"""Readers of runtimes, with which `verify` and `export` compare. A new runtime needs only one of these.

A runtime is a module of this package with a `READER` (or another name, after a colon), named in `READERS` below:

    READER = Reader(version=..., install="pip install ...", read=...)

`read(subject, prompts)` gives the log-probabilities of the token after each prompt, over the whole vocabulary, as the
runtime computes them from `subject.path`; it raises a PosencError where the runtime refuses. It should run the runtime
in a process of its own, which may end or bring its own torch, and in fp32 where the runtime can.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import PosencError, suggestion

READERS = {
    "llama.cpp": "llama_cpp_reader",
    "transformers": "plain_transformers",
    "onnx": "onnx_reader",
    "vllm": "external_runtimes:VLLM_READER",
    "mlx": "external_runtimes:MLX_READER",
    "ct2": "external_runtimes:CT2_READER",
}
"""The module of the `READER`, by the name of the runtime on the command line."""

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Subject:
    """A path for a runtime to read, and the model to compare with."""

    path: Path
    """A folder, or a file of the runtime's own format."""
    source: Path
    """The folder of the original checkpoint; `path` itself, unless that is a file."""
    model: Any
    """Live, in fp32."""


@dataclass(frozen=True)
class Reader:
    """A runtime that can compute log-probabilities."""

    version: Callable[[], str | None]
    """The installed version, or None."""
    install: str
    """The command that installs it."""
    read: Callable[[Subject, Prompts], list[Tensor]]
    dtype: Callable[[Subject], str] = lambda subject: "f32"
    """The precision of stored weights: a key of `proof.LIMITS`."""


def reader_of(runtime: str) -> Reader:
    if runtime not in READERS:
        raise PosencError(f"There is no way to verify with {runtime!r}.{suggestion(runtime, list(READERS))}")
    module, _, name = READERS[runtime].partition(":")
    found: Reader = getattr(import_module(f".{module}", __package__), name or "READER")
    return found
