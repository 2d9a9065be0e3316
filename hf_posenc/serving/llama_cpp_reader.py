"""GGUF files in llama.cpp. A folder without one is exported to a temporary file."""

from __future__ import annotations

import tempfile
from pathlib import Path

from torch import Tensor

from ..errors import PosencError
from . import llama_cpp
from .gguf.header import read_header
from .readers import Prompts, Reader, Subject

NORMAL = 1
TOKENS, KINDS = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"


def gguf_file(path: Path) -> Path | None:
    """The GGUF file at a path; None for a folder without one."""
    if path.is_file():
        return path
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        raise PosencError(f"{path} holds {len(found)} GGUF files; name one: {', '.join(f.name for f in found)}.")
    return found[0] if found else None


def read(subject: Subject, prompts: Prompts) -> list[Tensor]:
    size = subject.model.get_input_embeddings().weight.shape[0]
    file = gguf_file(subject.path)
    if file is not None:
        return llama_cpp.log_probabilities(file, prompts, size, visible_token(file))
    from .gguf.vocabulary import read_vocabulary  # these need an extra
    from .gguf.write import write_gguf

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{subject.path.name}.gguf"
        write_gguf(subject.model, read_vocabulary(subject.path, size), file, "f32")
        return llama_cpp.log_probabilities(file, prompts, size, visible_token(file))


def visible_token(file: Path) -> int:
    """A token of plain text."""
    keys = read_header(file, (TOKENS, KINDS)).keys
    tokens, kinds = keys.get(TOKENS) or (), keys.get(KINDS) or ()
    for index in reversed(range(min(len(tokens), len(kinds)))):
        if kinds[index] == NORMAL and tokens[index].isascii() and tokens[index]:
            return index
    raise PosencError(f"{file} has no tokenizer with a token of plain text, which is needed to run llama.cpp.")


def dtype(subject: Subject) -> str:
    file = gguf_file(subject.path)
    return "f32" if file is None else read_header(file).dtype


READER = Reader(llama_cpp.version, f"pip install {llama_cpp.PACKAGE}", read, dtype)
