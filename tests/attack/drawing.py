"""What cases are made of: a cell (scheme, family, dtype, kernel), its model, its judge, and how they are compared."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from attack.reference import KEEPING, OWN_TABLE, Reference
from cells import LENGTH, VOCAB, tiny
from torch import Tensor

from hf_posenc import patch_model
from hf_posenc.runtime import (
    cache_layers,
    gradients,
    layouts,
    masks,
    positions,
    relative,
    relative_texts,
    renderings,
    zones,
)

FOUR = {"factor": 4.0}
BUCKETS = {"relative_attention_num_buckets": 16, "relative_attention_max_distance": 30}
SCHEMES: dict[str, list[dict[str, Any]]] = {
    "rope": [{}, {"rope_theta": 500.0}],
    "linear": [FOUR],
    "ntk": [FOUR],
    "yarn": [{**FOUR, "beta_fast": 4.0, "beta_slow": 0.5}],
    "llama3": [{**FOUR, "low_freq_factor": 0.5, "high_freq_factor": 4.0}],
    "proportional": [{"partial_rotary_factor": 0.5}],
    "longrope": [{**FOUR, "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0]}],
    "dynamic_ntk": [{}, {"step": 1}, {"factor": 4.0, "step": 7}],
    "none": [{}],
    "alibi": [{}],
    "t5": [BUCKETS],
    "sinusoidal": [{"target_length": 128}],
    "fourier": [{"frequencies": "learned", "target_length": 128}],
    "learned": [{"target_length": 128}],
    "self_extend": [{**FOUR, "window": 5, "group": 8}, {**FOUR, "window": 9, "group": 7}],
    "rerope": [{"window": 5}, {"target_length": 96, "window": 10, "slope": 6.0}],
    "dca": [{"chunk": 7, "local_window": 5}, {"chunk": 11, "local_window": 5}],
    "streaming": [{"sinks": 2, "window": 6}, {"sinks": 4, "window": 13}],
    "lm_infinite": [{"global_tokens": 2, "window": 6}],
    "window": [{"window": 6}],
    "sparse": [{"window": 4, "global_tokens": 1, "stride": 5}],
    "string": [{"shift": 9, "window": 3}],
    "clip": [{}, {"pairs": 2}, {"pairs": 3, "taper": True}],
    "kerple": [{}, {"kernel": "power", "seed": 1}],
    "fire": [{"threshold": 20}, {"threshold": 200, "seed": 1}],
    "sandwich": [{}, {"size": 16}],
    "fox": [{"constant": 1.0, "std": 0.3}],
    "cable": [{"constant": -1.0, "std": 0.3, "seed": 1}],
    "shaw": [{"max_distance": 5}, {"max_distance": 16, "relative_values": True, "relative_queries": True}],
    "transformer_xl": [{}],
    "deberta": [{"position_buckets": 8, "max_relative_positions": 20}],
    "plan": [
        {"layers": [("none", {}), ("yarn", {**FOUR, "beta_fast": 4.0, "beta_slow": 0.5})]},
        {"layers": [("window", {"window": 6}), ("none", {})]},
        {"layers": [("alibi", {}), ("native", {})]},
        {"layers": [("linear", FOUR), ("dynamic_ntk", {"step": 7})]},
        {"layers": [("self_extend", {**FOUR, "window": 5, "group": 8}), ("ntk", FOUR)]},
        {"layers": [("none", {"temperature": {"kind": "log", "length": 8}}), ("window", {"window": 6})]},
        {"layers": [("kerple", {}), ("rope", {"temperature": {"kind": "ssmax", "start": 0.3}})]},
        {"layers": [("fox", {"constant": 1.0, "std": 0.3}), ("t5", BUCKETS)]},
        {"layers": [("shaw", {"max_distance": 5, "relative_values": True}), ("dca", {"chunk": 7, "local_window": 5})]},
        {
            "layers": [
                ("native", {}),
                ("fire", {"threshold": 20, "temperature": {"kind": "llama4", "floor": 8, "beta": 0.3}}),
            ]
        },
        {"layers": [("rerope", {"window": 5}), ("deberta", {"position_buckets": 8, "max_relative_positions": 20})]},
    ],
}
TWO_POSITIONS = ("self_extend", "rerope", "dca", "streaming", "lm_infinite", "string", "plan")
ABSOLUTE = ("sinusoidal", "fourier", "learned", "longrope", "dynamic_ntk", "fire", "sparse", *TWO_POSITIONS)
"""Schemes that look at where a token stands, and not at distances alone."""
HEATS: tuple[dict[str, Any], ...] = (
    {"kind": "log", "length": 8},
    {"kind": "llama4", "floor": 8, "beta": 0.3},
    {"kind": "ministral", "llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 8},
    {"kind": "drope", "c": 0.2},
    {"kind": "ssmax", "start": 0.3},
)
NATIVE = "native"
"""No patch: whatever then goes wrong alike is not this package's."""
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
WORST = {"float32": 4e-3, "float64": 4e-3}
MEAN = {"bfloat16": 0.5, "float16": 0.1}
"""The largest difference of logits (which run to 10) that is right; half precision is judged by the mean."""


class Wrong(Exception):
    """A result that is not the reference's."""


@dataclass(frozen=True)
class Cell:
    scheme: str
    variant: int
    kind: str
    dtype: str = "float32"
    kernel: str = "sdpa"
    heated: int | None = None
    layers: int = 2

    @property
    def options(self) -> dict[str, Any]:
        return {} if self.scheme == NATIVE else SCHEMES[self.scheme][self.variant]

    @property
    def heat(self) -> dict[str, Any] | None:
        return None if self.heated is None else HEATS[self.heated]

    @property
    def longest(self) -> int:
        """Tokens that the model has positions for."""
        return 96


def drawn_cell(draw: random.Random, kinds: tuple[str, ...], dtypes: tuple[str, ...] = ("float32",)) -> Cell:
    kind = draw.choice(kinds)
    names = [name for name in SCHEMES if kind in ("llama", "qwen3") or name not in TWO_POSITIONS]
    scheme = draw.choice(names)
    variant, heated = draw.randrange(len(SCHEMES[scheme])), draw.randrange(len(HEATS))
    told_how_far = "factor" in SCHEMES[scheme][variant]
    if draw.random() > 0.2 or scheme == "plan" or (HEATS[heated]["kind"] == "drope" and not told_how_far):
        heated = None
    return Cell(scheme, variant, kind, draw.choice(dtypes), draw.choice(("sdpa", "eager")), heated)


def drawn_block(draw: random.Random) -> int | None:
    """A size for the blocks that long texts are read in, for which texts here are too short."""
    return draw.choice((None, None, 8, 16))


@contextmanager
def blocks_of(size: int | None) -> Iterator[None]:
    """What is done in blocks of hundreds of tokens is done in blocks of so many, and one token is few."""
    rooms = (gradients, layouts, masks, relative, renderings, relative_texts, zones)
    sizes = [(room, "BLOCK", size) for room in rooms]
    sizes += [(room, "FEW", 2) for room in (positions, renderings, zones)] + [(cache_layers, "ROOM", size)]
    before = [(room, name, getattr(room, name)) for room, name, _ in sizes]
    try:
        for room, name, value in sizes if size else ():
            setattr(room, name, value)
        yield
    finally:
        for room, name, value in before:
            setattr(room, name, value)


@cache
def original(kind: str, dtype: str, kernel: str, layers: int = 2) -> Any:
    sizes = {"head_dim": 8} if kind in ("llama", "qwen3") else {"max_position_embeddings": 128}
    model = tiny(kind, num_hidden_layers=layers, **sizes)
    model.set_attn_implementation(kernel)
    return model.to(DTYPES[dtype])


@cache
def helper(kind: str) -> Any:
    """Drafts tokens for others. `generate` writes to its settings, so that it is nobody else's."""
    return copy.deepcopy(original(kind, "float32", "sdpa"))


def asked(cell: Cell) -> tuple[Any, dict[str, Any]]:
    """What patch_model is told."""
    if cell.scheme == "plan":
        parts = [("own" if name == NATIVE else (name, given)) for name, given in cell.options["layers"]]
        return {"0": parts[0], "rest": parts[1]}, {"trained_length": LENGTH}
    own_table = cell.scheme in KEEPING and cell.kind in OWN_TABLE  # which is as long as it is
    length = {} if own_table else {"trained_length": LENGTH}
    return cell.scheme, {**length, **cell.options, **({} if cell.heat is None else {"temperature": cell.heat})}


@cache
def patched(cell: Cell) -> Any:
    model = original(cell.kind, cell.dtype, cell.kernel, cell.layers)
    if cell.scheme == NATIVE:
        return model
    given, options = asked(cell)
    model = patch_model(copy.deepcopy(model), given, **options)
    for name, parameter in model.named_parameters():
        if "posenc_bias" in name and cell.scheme == "t5":
            generator = torch.Generator().manual_seed(1)
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
        if name.endswith(".multiplier"):  # at whole numbers FIRE's threshold is a kink, which has two right gradients
            parameter.data.fill_(1.03)
    return model


@cache
def judge(cell: Cell) -> Reference:
    return Reference(cell.kind, cell.scheme, cell.options, patched(cell).state_dict(), cell.heat, cell.layers)


@contextmanager
def judged_by(cell: Cell, weights: dict[str, Tensor], swapped: bool = False) -> Iterator[None]:
    """By other weights than those of the patched model; `swapped`: its two layers have changed places."""
    known, other = judge(cell), Reference(cell.kind, cell.scheme, cell.options, weights, cell.heat)
    own = known.w, known.parts
    try:
        known.w, known.parts = other.w, other.parts[::-1] if swapped else other.parts
        yield
    finally:
        known.w, known.parts = own


def meant(cell: Cell, ids: Tensor, at: Tensor | None = None, visible: Tensor | None = None, ahead: bool = False):
    """The reference's logits of one row, (tokens, words)."""
    n = len(ids)
    at = torch.arange(n) if at is None else at
    causal = cell.kind != "bert"
    if visible is None:
        visible = torch.ones(n, n, dtype=torch.bool)
        visible = visible.tril() if causal else visible
    counted = at + 1 if causal else torch.full((n,), n)
    if ahead:
        counted = torch.where(visible, at[None], 0).amax(-1) + 1
    return judge(cell).logits(ids, at, visible, counted)


def compare(cell: Cell, found: Tensor, expected: Tensor, what: str, dtype: str | None = None) -> None:
    if found.shape != expected.shape:
        raise Wrong(f"{what}: shape {tuple(found.shape)}, not {tuple(expected.shape)}")
    off = (found.double() - expected).abs()
    kind = dtype or cell.dtype
    if not bool(off.isfinite().all()):
        raise Wrong(f"{what}: not finite")
    if kind in WORST and float(off.max()) > WORST[kind]:
        raise Wrong(f"{what}: {float(off.max()):.4f} off")
    if kind in MEAN and float(off.mean()) > MEAN[kind]:
        raise Wrong(f"{what}: {float(off.mean()):.4f} off on average")


def drawn_ids(draw: random.Random, n: int) -> Tensor:
    return torch.tensor([draw.randrange(3, VOCAB) for _ in range(n)])


@dataclass
class Drawn:
    """A case: what it is, for a report, and how to run it on a model."""

    mode: str
    cell: Cell
    traits: dict[str, Any] = field(default_factory=dict)
    run: Callable[[Any, Cell], None] = lambda model, cell: None
    block: int | None = None
    made: Callable[[Cell], Any] = lambda cell: patched(cell)
    """The model that `run` is given."""


def padded(rows: list[Tensor], left: bool) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    ids, mask = torch.zeros(2, len(rows), width, dtype=torch.long)
    for n, row in enumerate(rows):
        where = slice(width - len(row), width) if left else slice(len(row))
        ids[n, where], mask[n, where] = row, 1
    return ids, mask
