"""How fast patched models decode, train and read, as a ratio to the unpatched model in the same run.

    python benchmarks/speed.py [--only decode|training|padded|prefill] [--device cpu|cuda] [--out FILE.json]

LLaMA shape, 4 layers, 8 heads x 64, trained at 2048, window 1024, factor 4. Candidates take turns and medians are
compared, so that a busy machine disturbs them alike; `--clock cpu` with `--threads 1` counts only the time that the
process itself had. Each run writes a JSON, from which the table in the docs is made.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from hf_posenc import patch_model

TRAINED, WINDOW = 2048, 1024
OPTIONS: dict[str, dict[str, Any]] = {
    "yarn": dict(factor=4.0),
    "alibi": {},
    "t5": {},
    "dynamic_ntk": {},
    "longrope": dict(factor=4.0),
    "self_extend": dict(factor=4.0, window=WINDOW),
    "rerope": dict(window=WINDOW),
    "dca": {},
    "streaming": dict(window=WINDOW),
    "lm_infinite": dict(window=WINDOW),
    "window": dict(window=WINDOW),
    "sparse": dict(window=WINDOW),
    "rope": {},
}
FOLLOWING, ZONES = ("dynamic_ntk", "longrope"), ("self_extend", "rerope", "dca")
SHORT = ("window", "streaming", "lm_infinite", "sparse")
BEFORE = {
    "decode": {"dynamic_ntk": 2.45, "longrope": 2.26, "self_extend": 4.08, "rerope": 4.16, "dca": 5.62}
    | {"window": 1.04, "sparse": 1.05, "rope": 1.10},
    "training": {"self_extend": 2.45, "rerope": 2.34, "dca": 2.90, "window": 1.55, "sparse": 1.26},
    "padded": {"self_extend": 1.56, "rerope": 1.47, "dca": 1.89, "window": 1.01, "sparse": 1.13},
    "prefill": {"dynamic_ntk": 2.01, "longrope": 1.66, "self_extend": 1.35, "rerope": 1.30, "dca": 1.15}
    | {"window": 0.76, "sparse": 1.09},
}
"""What was measured before anything was aimed at."""


@dataclass
class Row:
    what: str
    scheme: str
    length: int
    variant: str
    measured: float
    """Time over that of the unpatched model, or what `unit` says."""
    goal: float | None = None
    before: float | None = None
    unit: str = "time / unpatched"
    milliseconds: float = 0.0

    def __str__(self) -> str:
        told = [f"{x:6.2f}" if x is not None else "     -" for x in (self.before, self.goal, self.measured)]
        fine = "" if self.goal is None else "  ok" if self.measured <= self.goal else "  MISSED"
        name = f"{self.what:<9} {self.scheme:<12} {self.length:>5} {self.variant:<8}"
        return f"{name} {' '.join(told)}  {self.unit} ({self.milliseconds:.1f} ms){fine}"


@dataclass
class Bench:
    device: str
    rounds: int
    clock: Callable[[], float]

    def time(self, *calls: Callable[[], object]) -> list[float]:
        """Medians of calls that take turns, in milliseconds; the first turn is not counted."""
        times: list[list[float]] = [[] for _ in calls]
        for turn in range(self.rounds + 1):
            for call, found in zip(calls, times, strict=True):
                self._wait()
                start = self.clock()
                call()
                self._wait()
                if turn:
                    found.append(self.clock() - start)
        return [1000 * statistics.median(found) for found in times]

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def model(self, variant: str = "", kind: str = "llama") -> Any:
        torch.manual_seed(0)
        if kind == "gpt2":
            sizes = dict(n_embd=512, n_layer=4, n_head=8, n_positions=8192, vocab_size=1000)
            model: Any = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
        else:
            config = LlamaConfig(
                hidden_size=512,
                intermediate_size=1376,
                num_hidden_layers=4,
                num_attention_heads=8,
                num_key_value_heads=2 if variant == "gqa" else 8,
                vocab_size=1000,
                max_position_embeddings=TRAINED,
            )
            model = LlamaForCausalLM(config)
        dtype = torch.bfloat16 if variant == "bf16" else torch.float32
        return model.eval().to(self.device, dtype)

    def patched(self, scheme: str, variant: str = "", kind: str = "llama") -> Any:
        return patch_model(self.model(variant, kind), scheme, **OPTIONS[scheme])

    def ids(self, batch: int, length: int) -> Any:
        generator = torch.Generator().manual_seed(1)
        return torch.randint(3, 1000, (batch, length), generator=generator).to(self.device)


def filled(model: Any, batch: int, length: int, static: bool, device: str) -> Any:
    """A cache of so many tokens, without the time that it takes to read them."""
    config = model.config
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    shape = (batch, heads, length, config.hidden_size // config.num_attention_heads)
    cache: Any = StaticCache(config=config, max_cache_len=length + 64) if static else DynamicCache(config=config)
    generator = torch.Generator().manual_seed(2)
    forgets = getattr(config, "posenc", {}).get("scheme") == "streaming"
    if forgets:  # nobody else can fill its cache
        for part in torch.randint(3, 1000, (batch, length), generator=generator).to(device).split(1024, 1):
            model(part, past_key_values=cache, logits_to_keep=1)
        return cache
    for layer in range(config.num_hidden_layers):
        keys = torch.randn(shape, generator=generator).to(device, model.dtype)
        cache.update(keys, keys.flip(-1), layer)
    return cache


def size_of(held: Any, known: set[int]) -> int:
    """Bytes of all tensors in a cache or a layer, each memory once."""
    if isinstance(held, torch.Tensor):
        storage = held.untyped_storage()
        fresh = storage.data_ptr() not in known
        known.add(storage.data_ptr())
        return storage.nbytes() if fresh else 0
    if isinstance(held, dict):
        return sum(size_of(value, known) for value in held.values())
    if isinstance(held, (list, tuple)):
        return sum(size_of(value, known) for value in held)
    return sum(size_of(value, known) for value in vars(held).values()) if hasattr(held, "__dict__") else 0


@torch.no_grad()
def decode_rows(bench: Bench, schemes: list[str], variants: list[str], lengths: list[int]) -> Iterator[Row]:
    goals = dict.fromkeys(FOLLOWING, 1.15) | dict.fromkeys(ZONES, 1.3) | dict.fromkeys(SHORT, 0.7)
    for variant in variants:
        batch, static = 8 if variant == "batch8" else 1, variant.endswith("static")
        for length in lengths:
            plain = stepper(bench, bench.model(variant), batch, length, static, variant == "compiled static")
            for scheme in schemes:
                if scheme == "rope" or (static and scheme == "streaming"):
                    continue
                model = bench.patched(scheme, variant)
                step = stepper(bench, model, batch, length, static, variant == "compiled static")
                base, time_ = bench.time(plain, step)
                goal = goals.get(scheme) if length == 8192 else None
                goal = goal and goal * (1.1 if variant else 1)
                before = BEFORE["decode"].get(scheme) if (length, variant) == (8192, "") else None
                yield Row("decode", scheme, length, variant, time_ / base, goal, before, milliseconds=time_)
                if scheme in (*FOLLOWING, *ZONES) and not variant:
                    ratio = size_of(step.cache, set()) / size_of(plain.cache, set())
                    yield Row("decode", scheme, length, variant, ratio, 1.6, unit="memory of the cache / unpatched")
                del step, model
                gc.collect()
    if "rope" in schemes:
        plain = stepper(bench, bench.model("", "gpt2"), 1, 2048, False)
        step = stepper(bench, bench.patched("rope", "", "gpt2"), 1, 2048, False)
        base, time_ = bench.time(plain, step)
        yield Row("decode", "rope", 2048, "gpt2", time_ / base, 1.03, BEFORE["decode"]["rope"], milliseconds=time_)


def stepper(bench: Bench, model: Any, batch: int, length: int, static: bool, compiled: bool = False) -> Any:
    """A call that decodes four tokens more."""
    cache, ids = filled(model, batch, length, static, bench.device), bench.ids(batch, 1)
    run = torch.compile(model, dynamic=False) if compiled else model
    at = torch.tensor([[length]], device=bench.device)

    def step() -> None:
        nonlocal at
        for _ in range(4):
            run(ids, past_key_values=cache, position_ids=at)
            at = at + 1

    step.cache = cache  # type: ignore[attr-defined]
    for _ in range(3):
        run(ids, past_key_values=cache, position_ids=at)
        at = at + 1
    return step


def training_rows(bench: Bench, schemes: list[str], variants: list[str], lengths: list[int]) -> Iterator[Row]:
    goals = dict.fromkeys(ZONES, 1.6) | dict.fromkeys(("window", "sparse"), 1.0)
    for variant in variants:
        for length in lengths:
            ids = bench.ids(1, length)

            def stepped(model: Any, ids: Any = ids) -> Callable[[], object]:
                def step() -> None:
                    model.zero_grad()
                    model(ids, labels=ids, use_cache=False).loss.backward()

                model.train()
                return step

            plain = stepped(bench.model(variant))
            for scheme in schemes:
                base, time_ = bench.time(plain, stepped(bench.patched(scheme, variant)))
                fits = length == 4096 if scheme in ("window", "sparse") else length == 2048
                goal = goals.get(scheme) if fits else None
                before = BEFORE["training"].get(scheme) if length == 2048 else None
                yield Row("training", scheme, length, variant, time_ / base, goal, before, milliseconds=time_)
                gc.collect()


@torch.no_grad()
def padded_rows(bench: Bench, schemes: list[str], variants: list[str], lengths: list[int]) -> Iterator[Row]:
    for variant in variants:
        for length in lengths:
            ids = bench.ids(2, length)
            mask = torch.ones_like(ids)
            mask[0, : length // 4] = 0
            places = (mask.cumsum(-1) - 1).clamp(min=0)
            inputs = dict(use_cache=False, logits_to_keep=1)
            told = dict(attention_mask=mask, position_ids=places, **inputs)
            plain = bench.model(variant)
            for scheme in schemes:
                model = bench.patched(scheme, variant)
                base, whole, time_ = bench.time(
                    partial(plain, ids, **told), partial(model, ids, **inputs), partial(model, ids, **told)
                )
                before = BEFORE["padded"].get(scheme)
                goal = 1.2 if scheme in (*ZONES, *SHORT) else None
                unit = "time / unpadded"
                yield Row("padded", scheme, length, variant, time_ / whole, goal, None, unit, time_)
                yield Row("padded", scheme, length, variant, time_ / base, None, before, milliseconds=time_)


@torch.no_grad()
def prefill_rows(bench: Bench, schemes: list[str], variants: list[str], lengths: list[int]) -> Iterator[Row]:
    for variant in variants:
        for length in lengths:
            ids, plain = bench.ids(1, length), bench.model(variant)
            for scheme in schemes:
                model = bench.patched(scheme, variant)
                inputs = dict(use_cache=True, logits_to_keep=1)
                base, time_ = bench.time(partial(plain, ids, **inputs), partial(model, ids, **inputs))
                goal = 1.3 if scheme == "dynamic_ntk" and length == 4096 else None
                before = BEFORE["prefill"].get(scheme) if length == 4096 else None
                yield Row("prefill", scheme, length, variant, time_ / base, goal, before, milliseconds=time_)


GROUPS: dict[str, tuple[Any, list[int]]] = {
    "decode": (decode_rows, [4096, 8192]),
    "training": (training_rows, [2048, 4096]),
    "padded": (padded_rows, [2048]),
    "prefill": (prefill_rows, [4096]),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=GROUPS, action="append", help="one group of rows; may be given twice")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("build/benchmark/speed.json"))
    parser.add_argument("--schemes", nargs="+", default=[*FOLLOWING, *ZONES, *SHORT, "rope"], choices=OPTIONS)
    parser.add_argument("--variants", nargs="+", default=[""], help="'' gqa batch8 bf16 static 'compiled static'")
    parser.add_argument("--lengths", nargs="+", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    torch.set_num_threads(given.threads)
    clock = time.perf_counter if given.clock == "wall" else time.process_time
    bench, rows = Bench(given.device, given.rounds, clock), []
    print(f"{'':<39} before   goal  measured")
    for name in given.only or GROUPS:
        group, lengths = GROUPS[name]
        schemes = [s for s in given.schemes if s != "rope" or name == "decode"]
        for row in group(bench, schemes, given.variants, given.lengths or lengths):
            print(row, flush=True)
            rows.append(asdict(row))
    conditions = {
        "device": given.device,
        "machine": torch.cuda.get_device_name() if given.device == "cuda" else platform.processor(),
        "threads": given.threads,
        "clock": given.clock,
        "rounds": given.rounds,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "command": sys.argv[1:],
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps({"conditions": conditions, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
