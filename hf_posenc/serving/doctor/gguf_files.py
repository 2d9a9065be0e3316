"""Checks of GGUF files: of what llama.cpp reads in them, against the checkpoint beside them where there is one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...checkpoints.files import CONFIG
from ...engines.kinds import number
from ...patching.seal import is_sealed_config
from ...schemes.frequencies import yarn_frequencies
from ..gguf.header import Header, read_floats, read_header
from ..rotation import live_rotation
from .findings import NOTE, SUSPICIOUS, WRONG, Finding, check
from .reading import Checkpoint, read_checkpoint
from .ropes import length_of

UNROTATED = ("gpt2", "bert", "nomic-bert-moe", "t5", "bloom", "mpt", "clip")
"""Architectures that know positions otherwise."""
ANEW = "Write it from the checkpoint: hf-posenc export CHECKPOINT FILE.gguf, which proves it in llama.cpp."
MOST_PAIRS = 1 << 14


@dataclass(frozen=True)
class Gguf:
    """A GGUF file, and the checkpoint that it is held against."""

    path: Path
    header: Header
    beside: Checkpoint | None

    def number(self, key: str) -> float | None:
        return number(self.header.get(key))

    @property
    def scaling(self) -> str:
        return str(self.header.get("rope.scaling.type") or "none")


@dataclass(frozen=True)
class Rotation:
    """What q and k are rotated by."""

    inv_freq: tuple[float, ...]
    scaling: float


def read_gguf(path: Path, against: Path | None = None) -> Gguf:
    folder = against or path.parent
    return Gguf(path, read_header(path), read_checkpoint(folder) if (folder / CONFIG).is_file() else None)


def rotation_of(it: Gguf) -> Rotation | None:
    """As llama.cpp computes it from the file; None where it does not rotate, or the numbers make no sense."""
    heads, width = it.number("attention.head_count"), it.number("embedding_length")
    dim = it.number("rope.dimension_count") or it.number("attention.key_length")
    dim = dim or (width / heads if heads and width else None)
    theta = it.number("rope.freq_base") or 10_000.0
    if it.header.architecture in UNROTATED or not dim or dim < 2 or dim > 2 * MOST_PAIRS or theta <= 1:
        return None
    pairs = int(dim) // 2
    plain = tuple(theta ** (-i / pairs) for i in range(pairs))
    factor, scale = it.number("rope.scaling.factor") or 1.0, it.number("rope.scaling.attn_factor") or 1.0
    factors = read_floats(it.path, it.header, "rope_freqs.weight")
    if it.scaling == "longrope":
        factors = read_floats(it.path, it.header, "rope_factors_long.weight") or factors
    if len(factors) == pairs and all(f > 0 for f in factors):
        plain = tuple(p / f for p, f in zip(plain, factors, strict=True))
    if it.scaling == "linear":
        return Rotation(tuple(p / factor for p in plain), scale)
    if it.scaling == "yarn" and factor > 1:
        trained = it.number("rope.scaling.original_context_length") or it.number("context_length") or 1.0
        slowed = yarn_frequencies(plain, factor, int(trained), 32.0, 1.0, truncate=True)
        return Rotation(tuple(slowed), scale * (1 + 0.1 * math.log(factor)))
    return Rotation(plain, scale)


def stated_rotation(rotation: Rotation) -> str:
    longest = 2 * math.pi / max(min(rotation.inv_freq), 1e-30)
    return f"{len(rotation.inv_freq)} pairs, longest wave {longest:.4g} tokens, scale {rotation.scaling:.4g}"


@check("gguf", "frequencies")
def frequencies(it: Gguf) -> Iterator[Finding]:
    """Against the model that the config beside it makes: whatever a converter has dropped shows here."""
    if it.beside is None or is_sealed_config(it.beside.raw):
        return
    theirs, live = rotation_of(it), live_rotation(it.beside.model())
    if live is None or theirs is None:
        return
    ours = Rotation(live.inv_freq, live.attention_scaling)
    pairs = list(zip(theirs.inv_freq, ours.inv_freq, strict=False))
    same = len(theirs.inv_freq) == len(ours.inv_freq) and math.isclose(theirs.scaling, ours.scaling, rel_tol=1e-3)
    same = same and all(math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-12) for a, b in pairs)
    if not same:
        yield Finding(
            WRONG,
            f"llama.cpp rotates otherwise than the checkpoint beside it means: {stated_rotation(theirs)} (scaling "
            f"{it.scaling!r}, theta {it.number('rope.freq_base') or 10_000.0:g}), against {stated_rotation(ours)}.",
            ANEW,
        )


@check("gguf", "lengths")
def lengths(it: Gguf) -> Iterator[Finding]:
    says = it.number("context_length")
    meant = length_of(it.beside.section) if it.beside is not None else None
    if says and meant and says != meant:
        text = f"context_length is {says:g}, and the checkpoint beside it promises {meant:g}."
        yield Finding(SUSPICIOUS, text, "Pass -c with the length that is meant, or write the file anew.")
    factor, original = it.number("rope.scaling.factor"), it.number("rope.scaling.original_context_length")
    if says and factor and original and it.scaling == "yarn" and abs(factor * original - says) > 0.02 * says:
        text = f"{original:g} tokens times {factor:g} reach {factor * original:g}, and context_length is {says:g}."
        yield Finding(SUSPICIOUS, text, "Pass -c and --rope-scale with what is meant, or write the file anew.")


@check("gguf", "YaRN without its original length")
def original_missing(it: Gguf) -> Iterator[Finding]:
    if it.scaling == "yarn" and it.number("rope.scaling.original_context_length") is None:
        text = "The file says YaRN and not the trained length: llama.cpp takes context_length for it."
        yield Finding(WRONG, text, f"Pass --yarn-orig-ctx with the trained length, or: {ANEW}")


@check("gguf", "LongRoPE without factors")
def factors_missing(it: Gguf) -> Iterator[Finding]:
    if it.scaling == "longrope" and "rope_factors_long.weight" not in it.header.tensors:
        yield Finding(WRONG, "The file says LongRoPE and has no factors: llama.cpp computes a plain RoPE.", ANEW)


@check("gguf", "theta missing")
def theta_missing(it: Gguf) -> Iterator[Finding]:
    if it.number("rope.freq_base") is None and it.header.architecture not in UNROTATED:
        text = "The file has no rope.freq_base: llama.cpp takes 10000."
        yield Finding(NOTE, text, "If the model has another theta, pass --rope-freq-base, or write the file anew.")


@check("gguf", "sealed source")
def sealed_source(it: Gguf) -> Iterator[Finding]:
    if it.beside is not None and is_sealed_config(it.beside.raw):
        text = "The checkpoint beside it can be computed by hf_posenc alone: this file holds something else."
        yield Finding(WRONG, text, "hf-posenc serve-args PATH --for llama.cpp names the nearest scheme that can.")


@check("gguf", "rows of the table")
def rows(it: Gguf) -> Iterator[Finding]:
    shape, length = it.header.tensors.get("position_embd.weight", ((), ""))[0], it.number("context_length")
    if shape and length and max(shape[1:], default=0) < length:
        text = f"The position table has {max(shape[1:], default=0)} rows, and context_length is {length:g}."
        yield Finding(WRONG, text, ANEW)
