"""What patching costs, measured side by side: every figure is a ratio against something in the same run.

    python benchmarks/benchmark.py [--out build/benchmark] [--only WORD]

Prints a table, writes benchmark.json and benchmark.png. Candidates of a row take turns and their medians are
compared; memory is the peak of a process of its own above what it had before the call. Under ten minutes on two cores.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path

import compose_benchmark
import pattern_benchmark
import torch
import training_benchmark
import transformers
from attention_benchmark import (
    DTYPES,
    HEADS,
    alibi,
    attention_rows,
    growth_rows,
    our_attention,
    plain_attention,
    qkv,
)
from report import Row, Run, draw, medians, ratios, show
from transformers import AutoConfig, AutoModel, DynamicCache

from hf_posenc import patch_model
from hf_posenc.schemes.alibi import slopes

HIDDEN, LAYERS = 512, 4


# --- models


def model(kind: str, dtype: torch.dtype = torch.float32, **sizes: object) -> torch.nn.Module:
    common = dict(
        vocab_size=1000,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * HIDDEN,
        max_position_embeddings=8192,
    )
    if kind == "llama":
        common["num_key_value_heads"] = HEADS // 2
    torch.manual_seed(0)
    built = AutoModel.from_config(AutoConfig.for_model(kind, **{**common, **sizes}))
    return built.to(dtype).eval()


def patched(kind: str, scheme: str, dtype: torch.dtype = torch.float32, **options: object) -> torch.nn.Module:
    return patch_model(model(kind, dtype), scheme, **options)  # type: ignore[arg-type]


def tokens(length: int) -> torch.Tensor:
    return torch.arange(length)[None] % 1000


@torch.no_grad()
def prefill(m: torch.nn.Module, length: int, **given: object) -> object:
    return m(tokens(length), use_cache=False, **given) if m.config.model_type != "bert" else m(tokens(length), **given)


def dense_alibi(length: int, causal: bool) -> torch.Tensor:
    """What `position_bias` takes: one number per head and pair of tokens."""
    at = torch.arange(length)
    distance = at[:, None] - at
    bias = torch.tensor(slopes(HEADS))[:, None, None] * -distance.abs().float()
    return (bias.masked_fill(distance < 0, torch.finfo(torch.float32).min) if causal else bias)[None]


def with_dense(m: torch.nn.Module, length: int, causal: bool) -> object:
    return prefill(m, length, position_bias=dense_alibi(length, causal))


def decoder(m: torch.nn.Module, context: int) -> Run:
    """One token after `context` of them; the cache is cut back after each."""
    cache = DynamicCache(config=m.config)
    with torch.no_grad():
        for start in range(0, context, 1024):
            m(tokens(1024), past_key_values=cache, position_ids=torch.arange(start, start + 1024)[None])

    @torch.no_grad()
    def step() -> None:
        m(tokens(1), past_key_values=cache, position_ids=torch.tensor([[context]]))
        cache.crop(-1)

    return step


def repeat(run: Run, times: int) -> Run:
    return lambda: [run() for _ in range(times)]


def prefill_rows() -> list[Row]:
    rows = []
    for name, dtype in DTYPES.items():
        plain, ours = model("llama", dtype), patched("llama", "alibi", dtype)
        for length in (1024, 2048, 4096, 8192):
            runs = {"plain": partial(prefill, plain, length), "alibi": partial(prefill, ours, length)}
            value = ratios(runs, "plain", 5 if length < 4096 else 2 if length < 8192 else 1)["alibi"]
            rows.append(Row(f"LLaMA with ALiBi, prefill {length}, {name}", "unpatched", value, 1.10))
    return rows


def peer_rows() -> list[Row]:
    """The same model with ALiBi in every way that a user could take instead; ours must be the fastest."""
    runs = {name: prepared for name, prepared in peers(4096).items()}
    for run in runs.values():  # compiles what compiles
        run()
    found = medians(runs, 5)
    targets = {"bloom": 1 / 3, "mpt": 1 / 3}
    rows = [
        Row("LLaMA with ALiBi, prefill 4096", name, found["ours"] / seconds, targets.get(name, 1.0))
        for name, seconds in found.items()
        if name != "ours"
    ]
    memory = {name: peak(f"peer:{name}") for name in runs}
    for name in ("bloom", "mpt", "dense"):
        note = f"{memory['ours']:.0f} of {memory[name]:.0f} MB"
        most = 0.25 if name != "dense" else None
        rows.append(Row("its peak memory", name, memory["ours"] / memory[name], most, note=note))
    return rows


def peers(length: int) -> dict[str, Run]:
    return {name: partial(PEERS[name](), length) for name in PEERS}


def peer_llama(scheme: str) -> torch.nn.Module:
    """With as many parameters a layer as BLOOM and MPT (12 h^2): its MLP has three matrices, theirs two."""
    return patch_model(model("llama", intermediate_size=3 * HIDDEN), scheme)  # type: ignore[arg-type]


def flex_llama() -> Callable[[int], object]:
    """transformers' FlexAttention with a score_mod, compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    m = peer_llama("none")
    slope = torch.tensor(slopes(HEADS))
    compiled = torch.compile(flex_attention)
    masks: dict[int, object] = {}

    def attend(module, q, k, v, mask, scaling=None, **kwargs):
        n = q.shape[2]
        if n not in masks:
            masks[n] = create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, device="cpu")
        biased = lambda score, b, h, i, j: score - slope[h] * (i - j)  # noqa: E731
        out = compiled(q, k, v, score_mod=biased, block_mask=masks[n], scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register("benchmark_flex", attend)
    m.config._attn_implementation = "benchmark_flex"
    return partial(prefill, m)


PEERS: dict[str, Callable[[], Callable[[int], object]]] = {
    "ours": lambda: partial(prefill, peer_llama("alibi")),
    "dense": lambda: partial(with_dense, peer_llama("none"), causal=True),
    "flex": flex_llama,
    "bloom": lambda: partial(prefill, model("bloom")),
    "mpt": lambda: partial(prefill, model("mpt", d_model=HIDDEN, n_heads=HEADS, n_layers=LAYERS, max_seq_len=8192)),
}


def encoder_rows() -> list[Row]:
    rows = []
    dense = partial(with_dense, patched("bert", "none"), 4096, False)
    extra = peak("encoder:dense") - peak("encoder:none")
    for scheme in ("alibi", "t5"):
        runs = {"dense": dense, scheme: partial(prefill, patched("bert", scheme), 4096)}
        rows.append(Row(f"BERT with {scheme}, 4096", "dense position_bias", ratios(runs, "dense", 3)[scheme], 1.0))
        ours = peak(f"encoder:{scheme}") - peak("encoder:none")
        note = f"{ours:.0f} of {extra:.0f} MB above no bias"
        rows.append(Row("its extra memory", "dense position_bias", max(ours, 0) / extra, 0.25, note=note))
    return rows


def rope_rows() -> list[Row]:
    schemes = ("linear", "ntk", "yarn", "llama3")
    models = {"plain": model("llama"), **{s: patched("llama", s, factor=4.0) for s in schemes}}
    rows = []
    prefills = ratios({name: partial(prefill, m, 1024) for name, m in models.items()}, "plain", 11)
    decodes = ratios({name: repeat(decoder(m, 2048), 10) for name, m in models.items()}, "plain", 15)
    for scheme in schemes:
        rows.append(Row(f"LLaMA with {scheme}, prefill 1024", "unpatched", prefills[scheme], 1.02))
        rows.append(Row(f"LLaMA with {scheme}, decode at 2048", "unpatched", decodes[scheme], 1.02))
    table, rope = model("gpt2", max_position_embeddings=4096), patched("gpt2", "rope")
    runs = {"table": partial(prefill, table, 1024), "rope": partial(prefill, rope, 1024)}
    rows.append(Row("GPT-2 with RoPE, prefill 1024", "its own table", ratios(runs, "table", 11)["rope"], 1.10))
    runs = {"table": repeat(decoder(table, 2048), 10), "rope": repeat(decoder(rope, 2048), 10)}
    rows.append(Row("GPT-2 with RoPE, decode at 2048", "its own table", ratios(runs, "table", 15)["rope"], 1.10))
    return rows


def temperature_rows() -> list[Row]:
    return compose_benchmark.temperature_rows(patched, prefill, decoder, repeat)


def plan_rows() -> list[Row]:
    return compose_benchmark.plan_rows(patched, prefill, decoder, repeat)


def dynamic_rows() -> list[Row]:
    found = {}
    for context in (1024, 2048, 4096, 8192):
        models = {"plain": model("llama"), "dynamic": patched("llama", "dynamic_ntk", trained_length=1024)}
        runs = {name: repeat(decoder(m, context), 5) for name, m in models.items()}
        found[context] = ratios(runs, "plain", 9)["dynamic"]
    note = ", ".join(f"{n // 1024}k {value:.2f}" for n, value in found.items())
    return [Row("LLaMA with dynamic_ntk, decode at 4096", "unpatched", found[4096], 1.5, note=note)]


# --- memory, each in a process of its own


@cache
def peak(case: str) -> float:
    """Megabytes that one call adds at its peak, in a fresh process."""
    result = subprocess.run([sys.executable, __file__, "--memory", case], capture_output=True, text=True, check=True)
    return float(result.stdout.split()[-1])


def memory_case(case: str) -> Run:
    kind, _, name = case.partition(":")
    if kind == "peer":
        return partial(PEERS[name](), 4096)
    if kind == "pattern":
        return pattern_benchmark.memory_case(name)
    if kind == "training":
        return torch.enable_grad()(training_benchmark.memory_case(name))
    if kind == "attention":
        x = qkv(16384, torch.float32)
        return partial(plain_attention, x) if name == "plain" else partial(our_attention, x, alibi())
    if name == "dense":
        return partial(with_dense, patched("bert", "none"), 4096, False)
    return partial(prefill, patched("bert", name), 4096)


def megabytes(field: str) -> float:
    """What Linux says of this process: VmRSS (now) or VmHWM (the most so far)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def extra_memory(run: Run) -> float:
    Path("/proc/self/clear_refs").write_text("5")  # a child starts with its parent's peak: forget it
    before = megabytes("VmRSS")
    run()
    return megabytes("VmHWM") - before


def measure_memory(case: str) -> None:
    with torch.no_grad():
        print(extra_memory(memory_case(case)))


def memory_rows() -> list[Row]:
    dense = HEADS * 16384**2 * 4 / 2**20
    extra = peak("attention:alibi") - peak("attention:plain")
    note = f"{extra:.0f} MB above SDPA; one dense bias: {dense:.0f} MB"
    return [Row("causal ALiBi attention, 16384, extra memory", "a dense bias", max(extra, 0) / dense, 0.10, note=note)]


def patching_rows() -> list[Row]:
    config = AutoConfig.for_model(
        "llama", vocab_size=32000, hidden_size=2048, num_hidden_layers=16, intermediate_size=8192
    )
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        big = AutoModel.from_config(config)
    big = big.to(torch.bfloat16).to_empty(device="cpu")
    big.rotary_emb = type(big.rotary_emb)(config=config)
    count = sum(p.numel() for p in big.parameters()) / 1e9
    pointers = {name: p.data_ptr() for name, p in big.named_parameters()}
    rows = []
    for scheme, options in (("yarn", {"factor": 4.0}), ("alibi", {})):
        start = time.perf_counter()
        extra = extra_memory(partial(patch_model, big, scheme, **options))
        seconds = time.perf_counter() - start
        same = all(pointers[name] == p.data_ptr() for name, p in big.named_parameters() if name in pointers)
        what = f"patch_model({scheme!r}) on {count:.1f}B parameters, bf16"
        rows.append(Row(what, "-", seconds, 1.0, "s", f"no weight copied: {same}"))
        rows.append(Row("its extra memory", "-", extra, 50, "MB"))
    return rows


def pattern_rows() -> list[Row]:
    return pattern_benchmark.pattern_rows(peak)


def streaming_rows() -> list[Row]:
    return pattern_benchmark.streaming_rows(model)


def training_rows() -> list[Row]:
    return training_benchmark.training_rows(peak)


GROUPS = (
    attention_rows,
    memory_rows,
    growth_rows,
    prefill_rows,
    peer_rows,
    encoder_rows,
    rope_rows,
    temperature_rows,
    plan_rows,
    dynamic_rows,
    pattern_rows,
    streaming_rows,
    training_rows,
    patching_rows,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="build/benchmark")
    parser.add_argument("--only", default="", help="groups whose name has this word")
    parser.add_argument("--memory", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    if arguments.memory:
        measure_memory(arguments.memory)
        return
    start, rows = time.perf_counter(), []
    for group in GROUPS:
        if arguments.only in group.__name__:
            began = time.perf_counter()
            found = group()
            rows += found
            show(found)
            print(f"{group.__name__}: {time.perf_counter() - began:.0f} s", flush=True)
    seconds = time.perf_counter() - start
    conditions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "seconds": round(seconds),
    }
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    data = {"conditions": conditions, "rows": [{**asdict(row), "met": row.met} for row in rows]}
    (out / "benchmark.json").write_text(json.dumps(data, indent=2) + "\n")
    draw(rows, out / "benchmark.png")
    print(f"{sum(row.met is not False for row in rows)} of {len(rows)} met, {seconds:.0f} s; {conditions}")


if __name__ == "__main__":
    main()
