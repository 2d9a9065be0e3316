"""`export --fix`: a GGUF file that somebody's converter made, with the positions that the live model has."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from ...checkpoints.load import load
from ...errors import PosencError, UnsupportedModel
from ...models import model_path
from ...patching.describe import describe
from .. import llama_cpp
from ..llama_cpp_reader import visible_token
from ..proof import Proof, prove
from ..rotation import live_rotation, refuse_sealed
from .architectures import FREQS, KEYS, LONG_SHORT, Architecture
from .header import read_header
from .placing import check_existing, place
from .rope import RopeEntries, rope_entries
from .write import add_value, import_gguf

READS = {"llama": FREQS, "phi3": LONG_SHORT, **dict.fromkeys(("qwen2", "qwen3", "gemma", "gemma2"), KEYS)}
"""What llama.cpp calls an architecture -> what it reads its frequencies from there."""
FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
SKIPPED = ("GGUF.", "general.architecture")


def fix_gguf(
    source: str | os.PathLike[str], target: str | os.PathLike[str], made: str | os.PathLike[str]
) -> Proof | None:
    """Write the GGUF file `made`, which was converted from the checkpoint at `source`, as `target` with its positions
    corrected; proved where llama.cpp is installed. Nothing else of it changes."""
    path = Path(target)
    check_existing(path)
    if not Path(made).is_file():
        raise PosencError(f"{made} is not a file: --fix wants a GGUF that was converted from {source}.")
    model = load(Path(model_path(os.fspath(source)))).float().eval()
    return place(
        path,
        lambda part: rewrite(Path(made), part, model),
        lambda part: _proved(model, part),
        f" Was {made} converted from {source}?",
    )


def _proved(model: Any, file: Path) -> Proof:
    size, visible = model.get_input_embeddings().weight.shape[0], visible_token(file)
    return prove(
        model,
        lambda prompts: llama_cpp.log_probabilities(file, prompts, size, visible),
        f"llama.cpp ({llama_cpp.version()})",
        read_header(file).dtype,
    )


def rewrite(made: Path, target: Path, model: Any) -> None:
    """Copy a GGUF file, but for what it says of RoPE."""
    gguf = import_gguf()
    reader = gguf.GGUFReader(made)
    name = reader.fields["general.architecture"].contents()
    rope = _told(model, name)
    writer = gguf.GGUFWriter(target, name)
    try:
        prefix = f"{name}.rope."
        for field in reader.fields.values():
            replaced = field.name.startswith((f"{prefix}scaling.", f"{prefix}freq_base"))
            if not field.name.startswith(SKIPPED) and not replaced:
                inner = field.types[-1] if len(field.types) > 1 else None
                writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
        length = int(model.config.get_text_config().max_position_embeddings)
        writer.kv_data[0].pop(f"{name}.context_length", None)
        for key, value in {"context_length": length, **rope.keys}.items():
            add_value(writer, f"{name}.{key}", value)
        for tensor, values in rope.tensors.items():
            writer.add_tensor(tensor, np.array(values, dtype=np.float32))
        for tensor in reader.tensors:
            if tensor.name not in FACTORS:
                writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _told(model: Any, name: str) -> RopeEntries:
    if name not in READS:
        raise UnsupportedModel(
            f"What llama.cpp reads of RoPE in {name!r} files is not known here (known: {', '.join(READS)})."
        )
    refuse_sealed(model, "llama.cpp")
    rotation = live_rotation(model)
    if rotation is None:
        raise UnsupportedModel(f"{type(model).__name__} has no RoPE: there is nothing to correct in its file.")
    found: Any = describe(model)
    trained = found.trained_length or model.config.max_position_embeddings
    return rope_entries(rotation, Architecture(name=name, rope=READS[name]), trained, found.scheme)
