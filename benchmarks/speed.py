"""How fast patched models decode, train and read, as a ratio to the unpatched model in the same run.

    python benchmarks/speed.py [--only decode|variants|compiled|training|padded|prefill] [--device cpu|cuda]

LLaMA shape, 4 layers, 8 heads x 64, trained at 2048, window 1024, factor 4. All candidates of a group take turns and
medians are compared, so that a busy machine disturbs them alike; `--busy` counts only the time that the process itself
had, on one thread. What was measured is written to docs/results/ as JSON, a file for each kind of device, in which the
rows of other groups stay; `make docs` makes the table in docs/costs.md of it. Under eight minutes on two quiet cores.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo as dynamo
import transformers
from speed_attention import (
    BIASES,
    KINDS,
    LENGTH,
    PARTS,
    PLANS,
    TERMS,
    attention_calls,
    decoding,
    plan_models,
    reading,
    temperature_models,
)
from speed_models import FOLLOWING, SHORT, ZONES, cache_of, model_of, size_of, token_ids, trained_biases

RESULTS = Path(__file__).parent.parent / "docs" / "results"
BEFORE = {
    "decode": {"dynamic_ntk": 2.45, "longrope": 2.26, "self_extend": 4.08, "rerope": 4.16, "dca": 5.62}
    | {"window": 1.04, "sparse": 1.05, "rope": 1.10, "yarn": 1.00, "alibi": 1.07, "t5": 1.18},
    "training": {"t5": 2.31, "self_extend": 2.45, "rerope": 2.34, "dca": 2.90, "window": 1.55, "sparse": 1.26},
    "prefill": {"dynamic_ntk": 2.01, "longrope": 1.66, "self_extend": 1.35, "rerope": 1.30, "dca": 1.15}
    | {"window": 0.76, "sparse": 1.09, "yarn": 0.97, "alibi": 0.92, "t5": 1.09},
}
"""What was measured before anything was aimed at."""
DECODE = dict.fromkeys(FOLLOWING, 1.15) | dict.fromkeys(ZONES, 1.3) | dict.fromkeys(SHORT, 0.7)
GROWTH, MEMORY = 1.1, 1.6
VARIANTS = ("gqa", "batch 8", "bf16", "static")


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
    milliseconds: float | None = None

    def __str__(self) -> str:
        told = [f"{x:6.2f}" if x is not None else "     -" for x in (self.before, self.goal, self.measured)]
        fine = "" if self.goal is None else "  ok" if self.measured <= self.goal else "  MISSED"
        took = "" if self.milliseconds is None else f" ({self.milliseconds:.1f} ms)"
        name = f"{self.what:<9} {self.scheme:<12} {self.length:>5} {self.variant:<8}"
        return f"{name} {' '.join(told)}  {self.unit}{took}{fine}"


@dataclass
class Bench:
    device: str
    rounds: int
    clock: Callable[[], float]

    def times(self, calls: dict[str, Callable[[], object]], long: bool = False) -> dict[str, float]:
        """Medians of calls that take turns, in milliseconds. Where calls are short, a first turn is not counted; long
        ones take a third of the turns, and the median does not see the first."""
        found: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(max(self.rounds // 3, 1) if long else self.rounds + 1):
            for name, call in calls.items():
                self._wait()
                start = self.clock()
                call()
                self._wait()
                if turn or long:
                    found[name].append(self.clock() - start)
        return {name: 1000 * statistics.median(times) for name, times in found.items()}

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


# --- decoding


def stepper(bench: Bench, scheme: str, variant: str, length: int, kind: str = "llama", tokens: int = 4) -> Any:
    """A call that decodes some tokens more."""
    batch, static = 8 if variant == "batch 8" else 1, variant in ("static", "compiled")
    model = model_of(scheme, bench.device, variant, kind)
    cache, ids = cache_of(model, batch, length, static), token_ids(batch, 1, bench.device)
    run = torch.compile(model, dynamic=False) if variant == "compiled" else model
    at = torch.tensor([[length]], device=bench.device)

    def step(count: int = tokens) -> None:
        nonlocal at
        for _ in range(count):
            run(ids, past_key_values=cache, position_ids=at)
            at = at + 1

    step.cache = cache  # type: ignore[attr-defined]
    step(3)
    return step


@torch.no_grad()
def decode_rows(bench: Bench) -> Iterator[Row]:
    schemes, found, memory = ["yarn", "alibi", "t5", *DECODE], {}, {}
    for length in (4096, 8192):
        steps = {scheme: stepper(bench, scheme, "", length) for scheme in ["", *schemes]}
        found[length] = bench.times(steps)
        memory = {scheme: size_of(step.cache, set()) for scheme, step in steps.items()}
        del steps
        for scheme in schemes:
            ratio = found[length][scheme] / found[length][""]
            goal, before = (DECODE.get(scheme), BEFORE["decode"].get(scheme)) if length == 8192 else (None, None)
            yield Row("decode", scheme, length, "", ratio, goal, before, milliseconds=found[length][scheme])
    for scheme in (*FOLLOWING, *ZONES):
        growth = [times[scheme] / times[""] for times in found.values()]
        yield Row("decode", scheme, 8192, "", growth[1] / growth[0], GROWTH, unit="that ratio / the same at 4096")
        yield Row("decode", scheme, 8192, "", memory[scheme] / memory[""], MEMORY, unit="cache / unpatched")
    gpt2 = {scheme: stepper(bench, scheme, "", 2048, "gpt2", 16) for scheme in ("", "rope")}
    times = bench.times(gpt2)
    row = Row("decode", "rope", 2048, "gpt2", times["rope"] / times[""], 1.03, BEFORE["decode"]["rope"])
    yield row


@torch.no_grad()
def variant_rows(bench: Bench, variants: tuple[str, ...] = VARIANTS) -> Iterator[Row]:
    """Two candidates at a time: eight rows of a cache are a gigabyte."""
    dynamo.config.recompile_limit = 64  # past it the compiler gives up in silence, and eager calls would be timed
    for variant in variants:
        plain = stepper(bench, "", variant, 8192, tokens=2)
        for scheme, goal in DECODE.items():
            if scheme == "streaming" and variant in ("static", "compiled"):  # it keeps a cache of its own
                continue
            times = bench.times({"": plain, "us": stepper(bench, scheme, variant, 8192, tokens=2)})
            ratio = times["us"] / times[""]
            yield Row("decode", scheme, 8192, variant, ratio, round(1.1 * goal, 2), milliseconds=times["us"])


# --- training and reading


def training_rows(bench: Bench) -> Iterator[Row]:
    goals: dict[int, dict[str, float | None]] = {
        2048: dict.fromkeys(TERMS) | dict.fromkeys(trained_biases(), 1.3) | dict.fromkeys(ZONES, 1.6),
        4096: dict.fromkeys(("window", "sparse"), 1.0),
    }

    def step(model: Any, ids: Any) -> None:
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()

    for length, schemes in goals.items():
        ids = token_ids(1, length, bench.device)
        models = {scheme: model_of(scheme, bench.device).train() for scheme in ["", *schemes]}
        times = bench.times({scheme: partial(step, model, ids) for scheme, model in models.items()}, long=True)
        for scheme, goal in schemes.items():
            before = BEFORE["training"].get(scheme)
            ratio = times[scheme] / times[""]
            yield Row("training", scheme, length, "", ratio, goal, before, milliseconds=times[scheme])


@torch.no_grad()
def padded_rows(bench: Bench) -> Iterator[Row]:
    length = 2048
    ids = token_ids(2, length, bench.device)
    inputs = dict(use_cache=False, logits_to_keep=1)
    told = {}
    for side, part in (("left", slice(0, length // 4)), ("right", slice(-length // 4, None))):
        mask = torch.ones_like(ids)
        mask[0, part] = 0
        told[side] = dict(attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0), **inputs)
    for scheme in (*ZONES, *SHORT):
        model = model_of(scheme, bench.device)
        calls = {"": partial(model, ids, **inputs)} | {side: partial(model, ids, **told[side]) for side in told}
        times = bench.times(calls, long=True)
        for side in told:
            ratio = times[side] / times[""]
            yield Row("padded", scheme, length, side, ratio, 1.2, unit="time / unpadded", milliseconds=times[side])


@torch.no_grad()
def prefill_rows(bench: Bench) -> Iterator[Row]:
    length = 4096
    schemes = ["yarn", "alibi", "t5", *FOLLOWING, *ZONES, *SHORT]
    ids, inputs = token_ids(1, length, bench.device), dict(use_cache=True, logits_to_keep=1)
    models = {scheme: model_of(scheme, bench.device) for scheme in ["", *schemes]}
    times = bench.times({scheme: partial(model, ids, **inputs) for scheme, model in models.items()}, long=True)
    for scheme in schemes:
        goal, before = 1.3 if scheme in FOLLOWING else None, BEFORE["prefill"].get(scheme)
        yield Row("prefill", scheme, length, "", times[scheme] / times[""], goal, before, milliseconds=times[scheme])


# --- what is added to a scheme, or to attention


@torch.no_grad()
def attention_rows(bench: Bench) -> Iterator[Row]:
    """Biases and relative terms in one layer of attention."""
    times = bench.times(attention_calls(bench.device), long=True)
    for name in (*BIASES, *TERMS):
        goal, unit = 3.0 if name in TERMS else None, "time / causal SDPA"
        yield Row("attention", name, LENGTH, "", times[name] / times[""], goal, unit=unit, milliseconds=times[name])
    for name in BIASES:
        if name != "t5":
            yield Row("attention", name, LENGTH, "", times[name] / times["t5"], 1.3, unit="time / t5")


@torch.no_grad()
def temperature_rows(bench: Bench) -> Iterator[Row]:
    for scheme in PARTS:
        models = temperature_models(scheme, bench.device)
        for what, length, prepared in (("prefill", 1024, reading), ("decode", 2048, decoding)):
            times = bench.times({kind: prepared(model, bench.device) for kind, model in models.items()})
            for kind in KINDS:
                ratio = times[kind] / times[""]
                yield Row(what, scheme, length, kind, ratio, 1.02, unit="time / without it", milliseconds=times[kind])


@torch.no_grad()
def plan_rows(bench: Bench) -> Iterator[Row]:
    for parts in PLANS:
        models = plan_models(*parts, bench.device)
        for what, length, prepared in (("prefill", 1024, reading), ("decode", 2048, decoding)):
            times = bench.times({name: prepared(model, bench.device) for name, model in models.items()})
            ratio, unit = 2 * times["plan"] / sum(times[part] for part in parts), "time / mean of its parts"
            yield Row(what, " + ".join(parts), length, "plan", ratio, 1.0, unit=unit, milliseconds=times["plan"])


GROUPS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "decode": decode_rows,
    "variants": variant_rows,
    "compiled": partial(variant_rows, variants=("compiled",)),
    "training": training_rows,
    "padded": padded_rows,
    "prefill": prefill_rows,
    "attention": attention_rows,
    "temperature": temperature_rows,
    "plan": plan_rows,
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=GROUPS, action="append", help="one group of rows; may be given twice")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="the JSON; docs/results/speed-DEVICE.json if not given")
    parser.add_argument(
        "--rounds", type=int, default=9, help="turns that are counted; a third of them where calls are long"
    )
    parser.add_argument("--busy", action="store_true", help="one thread, and only the time that the process had")
    return parser.parse_args()


def merged_results(out: Path, conditions: dict[str, Any], rows: dict[str, list[dict[str, Any]]]) -> str:
    """The JSON of a run: groups that were not run stay as they were, each with its own conditions."""
    known = json.loads(out.read_text())["groups"] if out.exists() else {}
    fresh = {name: {"conditions": conditions, "rows": found} for name, found in rows.items()}
    groups = {name: {**known, **fresh}[name] for name in GROUPS if name in known or name in fresh}
    return json.dumps({"groups": groups}, indent=1) + "\n"


def main() -> None:
    given = arguments()
    warnings.filterwarnings("ignore")
    if given.busy:
        torch.set_num_threads(1)
    clock = time.process_time if given.busy else time.perf_counter
    bench = Bench(given.device, given.rounds, clock)
    conditions = {
        "device": given.device,
        "machine": torch.cuda.get_device_name() if given.device == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "clock": "cpu" if given.busy else "wall",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    out = given.out or RESULTS / f"speed-{given.device}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    print(f"{'':<38} before   goal    now")
    for name in given.only or GROUPS:
        gc.collect()
        start, rows = time.perf_counter(), []
        for row in GROUPS[name](bench):
            print(row, flush=True)
            rows.append(asdict(row))
        out.write_text(merged_results(out, conditions, {name: rows}))
        print(f"-- {name}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
