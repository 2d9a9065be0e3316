"""Cases drawn from a seed: a cell, a dtype, a mask, a cache and what is done to it, judged by the reference.

`outcome(seed)` runs one. Its kinds are what a report counts: right, refused (with an error of this package), theirs
(transformers refuses the unpatched model alike), WRONG, crashed.
"""

from __future__ import annotations

import copy
import pickle
import random
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from attack.reference import Reference
from cells import LENGTH, VOCAB, tiny
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Cache, QuantizedLayer

from hf_posenc import PosencError, patch_model

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


@cache
def original(kind: str, dtype: str, kernel: str) -> Any:
    model = tiny(kind, head_dim=8) if kind in ("llama", "qwen3") else tiny(kind, max_position_embeddings=128)
    model.set_attn_implementation(kernel)
    return model.to(DTYPES[dtype])


@cache
def helper(kind: str) -> Any:
    """Drafts tokens for others. `generate` writes to its settings, so that it is nobody else's."""
    return copy.deepcopy(original(kind, "float32", "sdpa"))


@cache
def patched(cell: Cell) -> Any:
    model = original(cell.kind, cell.dtype, cell.kernel)
    if cell.scheme == NATIVE:
        return model
    if cell.scheme == "plan":
        parts = [("own" if name == NATIVE else (name, given)) for name, given in cell.options["layers"]]
        return patch_model(copy.deepcopy(model), {"0": parts[0], "rest": parts[1]}, trained_length=LENGTH)
    heat = {} if cell.heat is None else {"temperature": cell.heat}
    model = patch_model(copy.deepcopy(model), cell.scheme, trained_length=LENGTH, **heat, **cell.options)
    for name, parameter in model.named_parameters():
        if "posenc_bias" in name and cell.scheme == "t5":
            generator = torch.Generator().manual_seed(1)
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return model


@cache
def judge(cell: Cell) -> Reference:
    return Reference(cell.kind, cell.scheme, cell.options, patched(cell).state_dict(), cell.heat)


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


# ---------------------------------------------------------------- one pass

MASKS = ("none", "left", "left_untold", "right", "packed", "packed_4d", "prefix", "prefix_float", "jumping")


def drawn_pass(draw: random.Random) -> Drawn:
    cell = drawn_cell(draw, ("llama", "qwen3", "gpt2", "bert"), ("float32",) * 3 + tuple(DTYPES))
    causal = cell.kind != "bert"
    mask = draw.choice(MASKS if causal else ("none", "left", "right"))
    grad, cached = draw.random() < 0.2, causal and draw.random() < 0.3 and not mask.startswith("packed")
    autocast = cell.dtype == "float32" and draw.random() < 0.1
    rows = [drawn_ids(draw, draw.randint(1, cell.longest)) for _ in range(draw.randint(1, 3))]
    case = Drawn("pass", cell, dict(mask=mask, grad=grad, use_cache=cached, autocast=autocast))
    chosen = draw.random()

    def run(model: Any, cell: Cell) -> None:
        inputs, expected = PASSES[mask](cell, rows, chosen)
        if causal:
            inputs["use_cache"] = cached
        about = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
        with torch.set_grad_enabled(grad), about:
            found = model(**inputs).logits.detach()
        for row, (where, told) in enumerate(expected()):
            compare(cell, found[row, where], told, f"row {row}", "bfloat16" if autocast else None)

    case.run = run
    return case


def _same_length(cell, rows, chosen):
    n = len(rows[0])
    rows = [row[:n] if len(row) >= n else torch.cat([row, rows[0][len(row) :]]) for row in rows]
    return {"input_ids": torch.stack(rows)}, lambda: [(slice(None), meant(cell, row)) for row in rows]


def _jumping(cell, rows, chosen):
    """Positions that leave some out: a text of which a part is not there."""
    row = rows[0][: max(len(rows[0]) // 2, 1)]
    at = torch.arange(len(row))
    gap = int(chosen * (cell.longest - len(row)))
    at = at + (at >= len(row) // 2) * gap
    inputs = {"input_ids": row[None], "position_ids": at[None], "attention_mask": torch.ones(1, len(row)).long()}
    return inputs, lambda: [(slice(None), meant(cell, row, at))]


def padded(rows: list[Tensor], left: bool) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    ids, mask = torch.zeros(2, len(rows), width, dtype=torch.long)
    for n, row in enumerate(rows):
        where = slice(width - len(row), width) if left else slice(len(row))
        ids[n, where], mask[n, where] = row, 1
    return ids, mask


def _left(cell, rows, chosen, told=True):
    ids, mask = padded(rows, left=True)
    width = ids.shape[1]
    inputs = {"input_ids": ids, "attention_mask": mask}
    if told:
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    return inputs, lambda: [(slice(width - len(row), width), meant(cell, row)) for row in rows]


def _left_untold(cell, rows, chosen):
    """Nobody says where the text begins but the mask. The unpatched model counts padding as well."""
    if cell.kind in ("gpt2", "bert") or cell.scheme in ABSOLUTE or cell.heated is not None:
        return _left(cell, rows, chosen)
    return _left(cell, rows, chosen, told=False)


def _right(cell, rows, chosen):
    ids, mask = padded(rows, left=False)
    return (
        {"input_ids": ids, "attention_mask": mask},
        lambda: [(slice(len(row)), meant(cell, row)) for row in rows],
    )


def four_dimensions(cell: Cell, visible: Tensor, numbers: bool) -> Tensor:
    """A mask as it goes straight to attention. transformers' eager attention adds it, so that it must be numbers."""
    mask = visible[None, None]
    if not numbers and cell.kernel == "sdpa":
        return mask
    dtype = DTYPES[cell.dtype]
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def _packed(cell, rows, chosen, four=False):
    ids, places = torch.cat(rows)[None], torch.cat([torch.arange(len(row)) for row in rows])[None]
    inputs = {"input_ids": ids, "position_ids": places}
    if four:
        of = torch.cat([torch.full((len(row),), n) for n, row in enumerate(rows)])
        visible = (of[:, None] == of) & torch.ones(len(of), len(of)).tril().bool()
        inputs["attention_mask"] = four_dimensions(cell, visible, numbers=False)
    return inputs, lambda: [(slice(None), torch.cat([meant(cell, row) for row in rows]))]


def _prefix(cell, rows, chosen, numbers=False):
    row = rows[0]
    n, first = len(row), 1 + int(chosen * len(row))
    visible = torch.ones(n, n).tril().bool()
    visible[:first, :first] = True
    mask = four_dimensions(cell, visible, numbers)
    at = torch.arange(n)[None]

    def expected():
        yield slice(None), meant(cell, row, None, visible, ahead=True)

    return {"input_ids": row[None], "attention_mask": mask, "position_ids": at}, expected


PASSES = {
    "none": _same_length,
    "left": _left,
    "left_untold": _left_untold,
    "right": _right,
    "packed": _packed,
    "packed_4d": lambda cell, rows, chosen: _packed(cell, rows, chosen, four=True),
    "prefix": _prefix,
    "prefix_float": lambda cell, rows, chosen: _prefix(cell, rows, chosen, numbers=True),
    "jumping": _jumping,
}


# ---------------------------------------------------------------- caches


class Lossless(QuantizedLayer):
    """A quantised layer that loses nothing, so that what it gives back can be judged."""

    def _quantize(self, tensor, axis):
        return tensor.clone()

    def _dequantize(self, tensor):
        return tensor


CACHES = {
    "dynamic": lambda config: DynamicCache(config=config),
    "lazy": lambda config: DynamicCache(),
    "static": lambda config: StaticCache(config=config, max_cache_len=192),
    "quantised": lambda config: Cache(layers=[Lossless(residual_length=6) for _ in range(2)]),
}
OPERATIONS = {
    "dynamic": ("reorder", "select", "repeat", "crop", "deepcopy", "pickle", "reset"),
    "lazy": ("reorder", "select", "repeat", "crop", "deepcopy", "pickle"),
    "static": ("reorder", "reset", "deepcopy"),
    "quantised": ("reorder", "deepcopy", "pickle", "reset"),
}


def drawn_cache(draw: random.Random) -> Drawn:
    cell = drawn_cell(draw, ("llama", "qwen3", "gpt2"), ("float32",) * 6 + ("float64", "bfloat16"))
    which = draw.choice(tuple(CACHES))
    operations = [draw.choice(OPERATIONS[which]) for _ in range(draw.randint(1, 3))]
    room = cell.longest - 4 * (len(operations) + 1)
    rows = [drawn_ids(draw, draw.randint(1, max(room, 2))) for _ in range(draw.randint(1, 3))]
    case = Drawn("cache", cell, dict(cache=which, operations=operations))
    seed = draw.random()

    def run(model: Any, cell: Cell) -> None:
        held = Held(cell, model, CACHES[which](model.config), rows, random.Random(seed))
        for operation in operations:
            held.do(operation)
            held.feed()

    case.run = run
    return case


class Held:
    """Rows in a cache, and beside it what they should be: operations are done to both."""

    def __init__(self, cell, model, past, rows, draw):
        self.cell, self.model, self.past, self.draw = cell, model, past, draw
        self.start(rows)

    def start(self, rows):
        self.rows = [row.clone() for row in rows]
        ids, self.mask = padded(self.rows, left=True)
        width, start = ids.shape[1], 0
        cuts = sorted({self.draw.randint(1, width) for _ in range(self.draw.randint(0, 3))} | {width})
        for end in cuts:
            found = self.pass_over(ids[:, start:end], end)
            start = end
        self.check(found[:, -1:], "after the prompt")

    def pass_over(self, ids, end):
        mask = self.mask[:, :end]
        places = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        with torch.no_grad():
            return self.model(ids, attention_mask=mask, position_ids=places, past_key_values=self.past).logits

    def check(self, found, what):
        count = found.shape[1]
        told = torch.stack([meant(self.cell, row)[-count:] for row in self.rows])
        compare(self.cell, found, told, what)

    def feed(self):
        count = self.draw.randint(1, 4)
        new = torch.stack([drawn_ids(self.draw, count) for _ in self.rows])
        self.mask = torch.cat([self.mask, torch.ones_like(new)], 1)
        found = self.pass_over(new, self.mask.shape[1])
        self.rows = [torch.cat([row, more]) for row, more in zip(self.rows, new, strict=True)]
        self.check(found, f"{count} more")

    def choose(self, which):
        self.rows, self.mask = [self.rows[i].clone() for i in which], self.mask[torch.tensor(which)]

    def do(self, operation):
        many, draw = len(self.rows), self.draw
        if operation in ("reorder", "select"):
            count = many if operation == "reorder" else draw.randint(1, 3)
            which = [draw.randrange(many) for _ in range(count)]
            method = self.past.reorder_cache if operation == "reorder" else self.past.batch_select_indices
            method(torch.tensor(which))
            self.choose(which)
        elif operation == "repeat":
            times = draw.randint(1, 2)
            self.past.batch_repeat_interleave(times)
            self.choose([i for i in range(many) for _ in range(times)])
        elif operation == "crop":
            gone = draw.randint(0, min(map(len, self.rows)) - 1)
            if gone:
                self.past.crop(-gone)
                self.rows, self.mask = [row[:-gone] for row in self.rows], self.mask[:, :-gone]
        elif operation == "deepcopy":
            self.past = copy.deepcopy(self.past)
        elif operation == "pickle":
            self.past = pickle.loads(pickle.dumps(self.past))
        elif operation == "reset":
            self.past.reset()
            self.start([drawn_ids(draw, draw.randint(1, 20)) for _ in range(many)])


# ---------------------------------------------------------------- generation

WAYS = ("greedy", "beam", "assisted", "lookup", "static", "sample", "contrastive", "no_cache")


def drawn_generation(draw: random.Random) -> Drawn:
    cell = drawn_cell(draw, ("llama", "qwen3", "gpt2"))
    way = draw.choice(WAYS)
    count = 1 if way in ("assisted", "lookup") else draw.randint(1, 3)
    rows = [drawn_ids(draw, draw.randint(1, cell.longest - 12)) for _ in range(count)]
    if way == "lookup":
        rows = [torch.cat([row[: len(row) // 2 + 1]] * 2)[: cell.longest - 12] for row in rows]
    case = Drawn("generate", cell, dict(way=way, rows=count))
    seed = draw.randrange(1 << 30)

    def run(model: Any, cell: Cell) -> None:
        ids, mask = padded(rows, left=True)
        about: dict[str, Any] = dict(min_new_tokens=8, max_new_tokens=8, do_sample=False)
        about |= dict(return_dict_in_generate=True, output_logits=way != "beam")
        if way == "beam":
            about |= dict(num_beams=3, num_return_sequences=2, output_scores=True, length_penalty=1.0)
            about["min_new_tokens"] = None
            about["eos_token_id"] = VOCAB + 5
        if way == "assisted":
            about["assistant_model"] = helper(cell.kind)
            about["output_logits"] = False
        if way == "lookup":
            about |= dict(prompt_lookup_num_tokens=3, output_logits=False)
        if way == "static":
            about |= dict(cache_implementation="static", disable_compile=True)
        if way == "sample":
            torch.manual_seed(seed)
            about |= dict(do_sample=True, top_k=5)
        if way == "contrastive":
            about |= dict(penalty_alpha=0.6, top_k=4, output_logits=False)
        if way == "no_cache":
            about["use_cache"] = False
        with torch.no_grad():
            made = model.generate(ids, attention_mask=mask, **about)
        (judge_beams if way == "beam" else judge_tokens)(cell, rows, ids, made)

    case.run = run
    return case


def judge_tokens(cell, rows, ids, made):
    """The logits of each step, where generate gives them; else that each token is the reference's best, or near it."""
    width = ids.shape[1]
    for n, row in enumerate(rows):
        new = made.sequences[n, width:]
        told = meant(cell, torch.cat([row, new]))[len(row) - 1 : -1]
        if made.get("logits") is not None:
            compare(cell, torch.stack([step[n] for step in made.logits]), told, f"row {n}")
        else:
            told[:, 2] = -torch.inf  # the end comes after min_new_tokens
            short = told.max(-1).values - told.gather(1, new[:, None])[:, 0]
            if float(short.max()) > 2 * WORST["float32"]:
                raise Wrong(f"row {n}: a token {float(short.max()):.4f} below the best")


def judge_beams(cell, rows, ids, made):
    width = ids.shape[1]
    for n in range(len(made.sequences)):
        row, new = rows[n // 2], made.sequences[n, width:]
        told = meant(cell, torch.cat([row, new]))[len(row) - 1 : -1].log_softmax(-1)
        total = told.gather(1, new[:, None]).sum() / len(new)
        if abs(float(total - made.sequences_scores[n])) > WORST["float32"]:
            raise Wrong(f"beam {n}: its score is {float(total - made.sequences_scores[n]):.4f} off")


# ---------------------------------------------------------------- compiled


def drawn_compilation(draw: random.Random) -> Drawn:
    """One graph for several batches: whole ones and padded ones, each length another."""
    cell = drawn_cell(draw, ("llama", "gpt2", "bert"))
    dynamic = draw.choice((None, True))
    batches = [[drawn_ids(draw, draw.randint(2, 60)) for _ in range(2)] for _ in range(3)]
    case = Drawn("compile", cell, dict(dynamic=dynamic))

    def run(model: Any, cell: Cell) -> None:
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager", dynamic=dynamic)
        for rows in batches:
            inputs, expected = _left(cell, rows, 0.0)
            with torch.no_grad():
                found = compiled(**inputs).logits
            for row, (where, told) in enumerate(expected()):
                compare(cell, found[row, where], told, f"row {row}")

    case.run = run
    return case


# ---------------------------------------------------------------- outcomes

MODES = {
    "pass": (drawn_pass, 640),
    "cache": (drawn_cache, 300),
    "generate": (drawn_generation, 59),
    "compile": (drawn_compilation, 1),
}
"""And how often of a thousand. To compile takes seconds."""
WORDS = ("right", "refused", "theirs", "crashed", "WRONG")


def drawn(seed: int) -> Drawn:
    draw = random.Random(seed)
    mode = draw.choices(list(MODES), [weight for _, weight in MODES.values()])[0]
    return MODES[mode][0](draw)


def outcome(seed: int) -> tuple[str, Drawn, str]:
    """What became of a case: one of WORDS, the case, and what was found."""
    case = drawn(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            case.run(patched(case.cell), case.cell)
        except PosencError as error:
            return "refused", case, str(error)
        except Exception as error:
            told = str(error) if isinstance(error, Wrong) else f"{type(error).__name__}: {error}".splitlines()[0]
            word = "theirs" if _is_theirs(case, error) else "WRONG" if isinstance(error, Wrong) else "crashed"
            return word, case, told[:300]
    return "right", case, ""


def _is_theirs(case: Drawn, error: Exception) -> bool:
    """Whether the unpatched model fails alike: is as wrong by the reference, or raises the same."""
    cell = replace(case.cell, scheme=NATIVE, variant=0, heated=None)
    try:
        case.run(patched(cell), cell)
    except Exception as other:
        return type(other) is type(error)
    return False
