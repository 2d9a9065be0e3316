"""Files of strangers, read within bounds."""

from __future__ import annotations

import copy
import json
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ...checkpoints.files import CONFIG, INDEX, WEIGHTS, read_json
from ...checkpoints.on_disk import model_of_config
from ...engines.kinds import number
from ...errors import PosencError
from ...patching.describe import Description, describe

MOST = 64 << 20
"""Bytes of JSON that are read."""
SIDE = ("tokenizer_config.json", "generation_config.json", "sentence_bert_config.json")
"""Files beside a config that speak of lengths."""


def read_small_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file that is one; raises for whatever else it is."""
    if not file.is_file():
        raise PosencError(f"{file} is no file.")
    if file.stat().st_size > MOST:
        raise PosencError(f"{file} has {file.stat().st_size} bytes, too many for a JSON of this kind.")
    return read_json(str(file))


def optional_json(file: Path) -> dict[str, Any]:
    """The same, empty where there is none or it cannot be read."""
    try:
        return read_small_json(file)
    except (PosencError, OSError):
        return {}


@dataclass(frozen=True)
class Stored:
    """A tensor in a file of weights."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def floats(self) -> tuple[float, ...]:
        """Its numbers, of a short fp32 vector; empty for any other."""
        size = self.end - self.begin
        if self.dtype != "F32" or not 0 < size <= 1 << 16 or size % 4:
            return ()
        with open(self.file, "rb") as stream:
            stream.seek(self.begin)
            data = stream.read(size)
        return struct.unpack(f"<{size // 4}f", data) if len(data) == size else ()


def stored_tensors(file: Path) -> dict[str, Stored]:
    """What the header of a safetensors file names."""
    with open(file, "rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        if size > min(MOST, file.stat().st_size):
            raise PosencError(f"{file} is not a safetensors file, or damaged.")
        try:
            header = json.loads(stream.read(size))
            found = {
                name: Stored(
                    file, about["dtype"], tuple(about["shape"]), *(8 + size + n for n in about["data_offsets"])
                )
                for name, about in header.items()
                if name != "__metadata__"
            }
            whole = max((tensor.end for tensor in found.values()), default=8 + size)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise PosencError(f"{file} is not a safetensors file, or damaged.") from None
    if whole > file.stat().st_size:
        raise PosencError(f"{file} is cut off: it has {file.stat().st_size} bytes, and its header speaks of {whole}.")
    return found


LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers", "depth")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
LARGE = {
    **dict.fromkeys(LAYERS, 1 << 10),
    **dict.fromkeys(EXPERTS, 1 << 12),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "num_attention_heads"), 1 << 20),
    **dict.fromkeys(("head_dim", "kv_channels", "qk_rope_head_dim"), 1 << 16),
}
CELLS = 1 << 35
"""Sizes past which a config is not built, not even without weights: nobody serves such a model."""


@dataclass(frozen=True)
class Checkpoint:
    """The folder of a checkpoint, or a config that stands alone."""

    raw: dict[str, Any]
    """config.json."""
    folder: Path | None = None

    @property
    def section(self) -> dict[str, Any]:
        """The part that speaks of text."""
        inner = self.raw.get("text_config")
        return inner if isinstance(inner, dict) else self.raw

    def model(self) -> PreTrainedModel:
        """Built as its config says, without weights; raises where that cannot be, in transformers' many ways."""
        refuse_giants(self.raw)
        return model_of_config(copy.deepcopy(self.raw))

    def description(self) -> Description:
        """What it does with positions; raises as above."""
        return describe(self.model())

    @cached_property
    def side(self) -> dict[str, dict[str, Any]]:
        """The other small files."""
        return {name: optional_json(self.folder / name) if self.folder else {} for name in SIDE}

    @cached_property
    def tensors(self) -> dict[str, Stored]:
        """The weights by name; raises where they are damaged."""
        if self.folder is None:
            return {}
        index = optional_json(self.folder / INDEX).get("weight_map")
        shards = set(index.values()) if isinstance(index, dict) else {WEIGHTS}
        # A name with a path in it would lead out of the folder.
        files = [self.folder / s for s in shards if isinstance(s, str) and Path(s).name == s]
        found: dict[str, Stored] = {}
        for file in files:
            if file.is_file():
                found |= stored_tensors(file)
        return found


def refuse_giants(section: dict[str, Any]) -> None:
    """Raise for sizes that are out of this world, in any part of a config."""
    for key, most in LARGE.items():
        if (number(section.get(key)) or 0) > most:
            raise PosencError(f"It is not built: {key} is {section[key]!r}.")
    for inner in section.values():
        if isinstance(inner, dict):
            refuse_giants(inner)
    width = number(section.get("hidden_size", section.get("n_embd"))) or 1
    length = number(section.get("max_position_embeddings", section.get("n_positions"))) or 1
    if width * length > CELLS:
        raise PosencError(f"It is not built: {length:g} positions.")


def read_checkpoint(folder: Path) -> Checkpoint:
    return Checkpoint(read_small_json(folder / CONFIG), folder)
