"""Tokenizers of transformers as llama.cpp reads them, or why not: two kinds, and the pre-tokenizers known by name."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import PosencError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Types of tokens, as GGUF numbers them."""
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = {
    ("ByteLevel",): "gpt-2",
    ("Digits", "ByteLevel"): "smollm",
    (LLAMA3, "ByteLevel without its pattern"): "llama-bpe",
    (LLAMA3.replace("{1,3}", ""), "ByteLevel without its pattern"): "qwen2",
}
"""Steps that cut a text before merges, and what llama.cpp calls them."""


@dataclass
class Vocabulary:
    """What a GGUF file holds of a tokenizer."""

    model: str
    pre: str
    tokens: list[bytes]
    types: list[int]
    scores: list[float] | None = None
    merges: list[str] | None = None
    special: dict[str, int] = field(default_factory=dict)
    """bos, eos, unknown, padding -> id."""
    add_bos: bool = False
    add_space_prefix: bool = True


class UnknownTokenizer(PosencError):
    """A tokenizer of a kind that cannot be told to llama.cpp here."""


def read_vocabulary(folder: Path, size: int) -> Vocabulary:
    """The vocabulary in a checkpoint's folder, with as many entries as the model has embeddings."""
    file = folder / "tokenizer.json"
    if not file.exists():
        raise UnknownTokenizer(f"{folder} has no tokenizer.json")
    data = json.loads(file.read_text(encoding="utf-8"))
    model, steps = data["model"], _steps(data.get("pre_tokenizer"))
    if model["type"] != "BPE":
        raise UnknownTokenizer(f"its tokenizer is of the kind {model['type']!r}, and only BPE can be converted here")
    if model.get("byte_fallback"):
        made = _sentencepiece(data, size)
    elif steps in PRE_TOKENIZERS:
        made = _byte_level(data, size, PRE_TOKENIZERS[steps])
    else:
        raise UnknownTokenizer(f"how its tokenizer cuts texts is not known to llama.cpp by a name: {steps}")
    made.special = _special_ids(folder, data)
    made.add_bos = _adds_bos(data, made.special)
    return made


def _steps(pre: dict[str, Any] | None) -> tuple[str, ...]:
    """The pre-tokenizer in a form that can be looked up."""
    if pre is None:
        return ()
    if pre["type"] == "Sequence":
        return tuple(step for one in pre["pretokenizers"] for step in _steps(one))
    if pre["type"] == "Split":
        return (str(pre["pattern"].get("Regex", pre["pattern"])),)
    if pre["type"] == "Digits":
        return ("Digits" if pre.get("individual_digits") else "Digits together",)
    if pre["type"] == "ByteLevel":
        spaced = " with a space in front" if pre.get("add_prefix_space") else ""
        return ("ByteLevel" + ("" if pre.get("use_regex", True) else " without its pattern") + spaced,)
    return (str(pre["type"]),)


def _entries(data: dict[str, Any], size: int) -> tuple[list[str], list[int]]:
    """Tokens by id and their types; ids that no token has are filled, since the embeddings have rows for them."""
    added = {one["id"]: one for one in data.get("added_tokens", [])}
    names = {index: token for token, index in data["model"]["vocab"].items()}
    names.update({index: one["content"] for index, one in added.items()})
    if names and max(names) >= size:
        raise UnknownTokenizer(f"its tokenizer has a token {max(names)}, and the model {size} embeddings")
    tokens = [names.get(i, f"[PAD{i}]") for i in range(size)]
    types = [
        UNUSED if i not in names else NORMAL if i not in added else CONTROL if added[i]["special"] else USER_DEFINED
        for i in range(size)
    ]
    return tokens, types


def _byte_level(data: dict[str, Any], size: int, pre: str) -> Vocabulary:
    tokens, types = _entries(data, size)
    merges = [m if isinstance(m, str) else " ".join(m) for m in data["model"]["merges"]]
    return Vocabulary("gpt2", pre, [t.encode() for t in tokens], types, merges=merges)


def _sentencepiece(data: dict[str, Any], size: int) -> Vocabulary:
    """BPE as SentencePiece does it: llama.cpp joins the pair whose whole scores highest, so scores follow merges."""
    tokens, types = _entries(data, size)
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(data["model"]["merges"]):
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        ranks.setdefault(left + right, rank)
    lowest = -float(len(data["model"]["merges"]) + 1)
    scores = [-float(ranks[t]) if t in ranks else lowest for t in tokens]
    for i, token in enumerate(tokens):
        if types[i] == NORMAL and len(token) == 6 and token.startswith("<0x"):
            types[i] = BYTE
    unknown = data["model"].get("unk_token") or "<unk>"
    if unknown in tokens:
        types[tokens.index(unknown)] = UNKNOWN
    pre, normalizer = data.get("pre_tokenizer") or {}, json.dumps(data.get("normalizer") or {})
    prefixed = pre.get("prepend_scheme", "never") != "never" or "Prepend" in normalizer
    encoded = [t.encode() for t in tokens]
    return Vocabulary("llama", "default", encoded, types, scores=scores, add_space_prefix=prefixed)


def _special_ids(folder: Path, data: dict[str, Any]) -> dict[str, int]:
    ids = {**data["model"]["vocab"], **{one["content"]: one["id"] for one in data.get("added_tokens", [])}}
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    found = {}
    for name, key in {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}.items():
        token = config.get(key)
        token = token.get("content") if isinstance(token, dict) else token
        if token in ids:
            found[name] = int(ids[token])
    return found


def _adds_bos(data: dict[str, Any], special: dict[str, int]) -> bool:
    """Whether a text is opened by BOS, as the post-processor says."""
    post = data.get("post_processor") or {}
    parts = post.get("processors", [post])
    for part in parts:
        single: list[dict[str, Any]] = part.get("single") or [{}]
        opening = single[0].get("SpecialToken", {}).get("id")
        ids = part.get("special_tokens", {}).get(opening, {}).get("ids", []) if opening else []
        if "bos" in special and special["bos"] in ids:
            return True
    return False
