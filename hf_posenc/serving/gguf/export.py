"""`export(..., to="gguf")`: a checkpoint as a GGUF file that llama.cpp loads as it is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ...checkpoints.load import load
from ...errors import PosencError
from ...models import model_path
from .. import llama_cpp
from ..proof import Proof, prove
from .placing import check_existing, place
from .vocabulary import NORMAL, UnknownTokenizer, Vocabulary, read_vocabulary
from .write import DTYPES, architecture_of, told_rope, write_gguf


def export_gguf(source: str | os.PathLike[str], target: str | os.PathLike[str], dtype: str = "f16") -> Proof | None:
    """Write the checkpoint at `source` as the file `target`, and prove it where llama.cpp is installed.

    A file that llama.cpp reads differently is not left behind.
    """
    folder, path = Path(model_path(os.fspath(source))), Path(target)
    if path.suffix != ".gguf":
        raise PosencError(f"{path} should be a file that ends in .gguf.")
    check_existing(path)
    model = load(folder).eval()
    told_rope(model, architecture_of(model))  # what cannot be said is refused before the tokenizer is looked at
    vocabulary = _vocabulary(folder, model)
    return place(
        path,
        lambda part: write_gguf(model, vocabulary, part, dtype, name=folder.name),
        lambda part: proved(model.float(), part, vocabulary, dtype),
    )


def _vocabulary(folder: Path, model: Any) -> Vocabulary:
    try:
        return read_vocabulary(folder, model.get_input_embeddings().weight.shape[0])
    except UnknownTokenizer as error:
        raise PosencError(
            f"The tokenizer of {folder} cannot be written into a GGUF file: {error}. Convert the checkpoint with "
            "llama.cpp's own convert_hf_to_gguf.py, and correct its positions: --fix CONVERTED.gguf."
        ) from None


def proved(model: Any, path: Path, vocabulary: Vocabulary, dtype: str) -> Proof:
    """The file at `path` read by llama.cpp, against the live model."""
    visible = next(i for i in reversed(range(len(vocabulary.types))) if _stands_for_text(vocabulary, i))
    size = model.get_input_embeddings().weight.shape[0]

    def read(prompts: Any) -> Any:
        return llama_cpp.log_probabilities(path, prompts, size, visible)

    assert dtype in DTYPES
    return prove(model, read, f"llama.cpp ({llama_cpp.version()})", dtype)


def _stands_for_text(vocabulary: Vocabulary, index: int) -> bool:
    return vocabulary.types[index] == NORMAL and vocabulary.tokens[index].isascii()
