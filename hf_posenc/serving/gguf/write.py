"""A GGUF file from a live model: weights, tokenizer, and the rotation that the model really has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ...errors import PosencError, UnsupportedCell, UnsupportedModel, suggestion
from ...extras import require
from ...patching.describe import describe
from ..rotation import live_rotation, refuse_sealed
from .architectures import ARCHITECTURES, Architecture, Array, interleaved
from .rope import RopeEntries, rope_entries
from .vocabulary import Vocabulary

DTYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0", "q8_0-f16": "Q8_0"}
"""What weights are stored as; vectors are always f32."""
ATTENTION = {"q8_0-f16": "F16"}
"""What the matrices of attention are stored as, where that differs."""


def architecture_of(model: Any) -> Architecture:
    kind = model.config.get_text_config().model_type
    if kind not in ARCHITECTURES:
        raise UnsupportedModel(
            f"No GGUF can be written here for {kind!r} models (known: {', '.join(ARCHITECTURES)}). Convert the "
            "checkpoint with llama.cpp's own convert_hf_to_gguf.py, then correct what it lost: "
            "hf-posenc export SRC --to gguf --fix MODEL.gguf."
        )
    return ARCHITECTURES[kind]


def told_rope(model: Any, architecture: Architecture) -> RopeEntries:
    """The positions of a model in llama.cpp's terms; raises where it has no terms for them."""
    refuse_sealed(model, "llama.cpp")
    rotation = live_rotation(model) if architecture.rope is not None else None
    if rotation is None:
        return RopeEntries()
    found: Any = describe(model)
    trained = found.trained_length or model.config.max_position_embeddings
    return rope_entries(rotation, architecture, trained, found.scheme)


def write_gguf(model: Any, vocabulary: Vocabulary | None, path: Path, dtype: str = "f16", name: str = "") -> None:
    """`vocabulary`: None writes a file that can be read, and not prompted with text."""
    gguf = import_gguf()
    if dtype not in DTYPES:
        raise PosencError(f"dtype {dtype!r} is not a choice.{suggestion(dtype, list(DTYPES))}")
    architecture = architecture_of(model)
    rope = told_rope(model, architecture)
    writer = gguf.GGUFWriter(path, architecture.name)
    try:
        _write_numbers(writer, model.config.get_text_config(), architecture, name)
        for key, value in rope.keys.items():
            add_value(writer, f"{architecture.name}.{key}", value)
        _write_vocabulary(gguf, writer, vocabulary, model.get_input_embeddings().weight.shape[0])
        for tensor, values in rope.tensors.items():
            writer.add_tensor(tensor, np.array(values, dtype=np.float32))
        for tensor, array in weights(gguf, model, architecture):
            stored, kind = _stored(gguf, array, type_of(tensor, dtype))
            writer.add_tensor(tensor, stored, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def import_gguf() -> Any:
    return require("gguf", "export", "A GGUF file")


def add_value(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    else:
        writer.add_float32(key, float(value))


def _write_numbers(writer: Any, config: Any, architecture: Architecture, name: str) -> None:
    heads = config.num_attention_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
    numbers: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": inner or 4 * config.hidden_size,
        "attention.head_count": heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", None) or heads,
        "vocab_size": config.vocab_size,
    }
    if architecture.rope is not None:
        partial = (config.rope_parameters or {}).get("partial_rotary_factor", 1.0)
        kind = (config.rope_parameters or {}).get("rope_type")
        rotated = head if kind == "proportional" else int(head * partial)
        if rotated != head:
            raise UnsupportedCell(f"This model rotates {rotated} of {head} channels, which is not written here yet.")
        numbers |= {"attention.key_length": head, "attention.value_length": head, "rope.dimension_count": rotated}
    for key, attribute in architecture.keys.items():
        if getattr(config, attribute, None) is not None:
            numbers[key] = getattr(config, attribute)
    writer.add_name(name or config.model_type)
    for key, value in numbers.items():
        add_value(writer, f"{architecture.name}.{key}", value)


def _write_vocabulary(gguf: Any, writer: Any, vocabulary: Vocabulary | None, size: int) -> None:
    if vocabulary is None:
        writer.add_tokenizer_model("none")
        writer.add_vocab_size(size)
        return
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.scores is not None:
        writer.add_token_scores(vocabulary.scores)
        writer.add_add_space_prefix(vocabulary.add_space_prefix)
    if vocabulary.merges is not None:
        writer.add_token_merges(vocabulary.merges)
    adders = {
        "bos": writer.add_bos_token_id,
        "eos": writer.add_eos_token_id,
        "unknown": writer.add_unk_token_id,
        "padding": writer.add_pad_token_id,
    }
    for name, token in vocabulary.special.items():
        adders[name](token)
    writer.add_add_bos_token(vocabulary.add_bos)


def weights(gguf: Any, model: Any, architecture: Architecture) -> Any:
    """Every tensor under llama.cpp's name, as fp32 arrays."""
    config = model.config.get_text_config()
    kind = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == architecture.name)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name.endswith(architecture.skipped) or "rotary_emb" in name or name.startswith("posenc_"):
            continue
        if id(tensor) in seen:  # tied: the runtime takes the embeddings where there is no output
            continue
        seen.add(id(tensor))
        if not tensor.is_floating_point():
            raise UnsupportedModel(
                f"{name} is held as {tensor.dtype}, in few bits: no GGUF is written from rounded weights. Load the "
                "original ones (quantization_config=None), or merge an adapter into them: hf-posenc merge."
            )
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if theirs is None:
            raise UnsupportedModel(f"llama.cpp's {architecture.name!r} has no tensor for {name!r}.")
        array = _array(tensor)
        if architecture.change is not None:
            array = architecture.change(name, array)
        if architecture.interleaved and ".q_proj." in name:
            array = interleaved(array, config.num_attention_heads)
        if architecture.interleaved and ".k_proj." in name:
            array = interleaved(array, config.num_key_value_heads)
        yield theirs, array


def _array(tensor: Tensor) -> Array:
    return np.asarray(tensor.detach().float().cpu().numpy())


def type_of(tensor: str, dtype: str) -> str:
    """What a matrix is stored as, in GGUF's words, by its name there or in transformers."""
    return ATTENTION.get(dtype, DTYPES[dtype]) if "attn" in tensor else DTYPES[dtype]


def _stored(gguf: Any, array: Array, name: str) -> tuple[Array, Any]:
    kind = gguf.GGMLQuantizationType[name]
    if array.ndim < 2 or name == "F32":
        return array.astype(np.float32), gguf.GGMLQuantizationType.F32
    if name == "Q8_0" and array.shape[-1] % 32:
        kind = gguf.GGMLQuantizationType.F16  # rows are quantised in blocks of 32
    if kind == gguf.GGMLQuantizationType.F16:
        return array.astype(np.float16), kind
    return gguf.quants.quantize(array, kind), kind
