"""What evaluation costs against the loops that everybody writes: memory of a long pass, time of sliding windows.

    python benchmarks/evaluation_benchmark.py [MODEL TEXT]
    python benchmarks/evaluation_benchmark.py --memory parts 131072      # megabytes of a pass in parts
    python benchmarks/evaluation_benchmark.py --processes                # two processes against one with two threads

A LLaMA with a vocabulary of 49k and random weights, and MODEL, if given, reading TEXT.
"""

import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from benchmark import extra_memory
from report import Row, ratios, show
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_posenc import load
from hf_posenc.evaluation import Document, Reading, read_documents, token_losses
from hf_posenc.evaluation.measures.perplexity import perplexity

VOCAB, LENGTH, STRIDE, STEP = 49_152, 8192, 256, 1024
ROOT = Path(__file__).parent.parent


def toy(hidden: int) -> torch.nn.Module:
    torch.manual_seed(0)
    heads = hidden // 64
    config = AutoConfig.for_model(
        "llama", vocab_size=VOCAB, hidden_size=hidden, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=heads, intermediate_size=4 * hidden, max_position_embeddings=LENGTH,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def tokens(length: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def plain_loss(model: torch.nn.Module, ids: torch.Tensor) -> float:
    return F.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:]).item()


def our_loss(model: torch.nn.Module, ids: torch.Tensor) -> float:
    return token_losses(model, ids[None]).mean().item()


def parted_loss(model: torch.nn.Module, ids: torch.Tensor) -> float:
    """Over a cache, a part at a time."""
    return token_losses(model, ids[None], step=STEP).mean().item()


WAYS = {"plain": plain_loss, "ours": our_loss, "parts": parted_loss}


@torch.no_grad()
def plain_sliding(model: torch.nn.Module, ids: torch.Tensor, window: int) -> float:
    """The loop of transformers' own guide to perplexity, every token weighing alike."""
    total, count, done = 0.0, 0, 0
    for begin in range(0, len(ids), STRIDE):
        end = min(begin + window, len(ids))
        row = ids[None, begin:end]
        labels = row.clone()
        labels[:, : -(end - done)] = -100
        scored = int((labels[:, 1:] != -100).sum())
        total += model(row, labels=labels).loss.item() * scored
        count, done = count + scored, end
        if end == len(ids):
            break
    return total / count


def our_sliding(model: torch.nn.Module, ids: torch.Tensor, window: int) -> float:
    reading = Reading(stride=STRIDE)
    return perplexity(model, [Document("text", ids)], window, protocol="sliding", reading=reading)[0].value


def memory(way: str, length: int = LENGTH) -> float:
    command = [sys.executable, __file__, "--memory", way, str(length)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def pass_rows() -> list[Row]:
    plain, ours, parts = (memory(way) for way in WAYS)
    model, ids = toy(64), tokens(LENGTH)
    runs = {"plain": partial(plain_loss, model, ids), "ours": partial(our_loss, model, ids)}
    what, note = f"token losses, {LENGTH} tokens, vocabulary {VOCAB}", f"{ours:.0f} of {plain:.0f} MB"
    return [
        Row(f"{what}: memory", "model(ids).logits", ours / plain, 1 / 3, note=note),
        Row(
            f"{what}, in parts: memory",
            "model(ids).logits",
            parts / plain,
            None,
            note=f"{parts:.0f} of {plain:.0f} MB",
        ),
        Row(f"{what}: time", "model(ids).logits", ratios(runs, "plain", 3)["ours"], 1.0),
    ]


def sliding_row(name: str, model: torch.nn.Module, ids: torch.Tensor, window: int, most: float | None) -> Row:
    seconds, values = {}, {}
    for way, run in (("plain", plain_sliding), ("ours", our_sliding)):
        run(model, ids[: window + STRIDE], window)
        start = time.perf_counter()
        values[way] = run(model, ids, window)
        seconds[way] = time.perf_counter() - start
    note = (
        f"{seconds['ours']:.1f} of {seconds['plain']:.1f} s; losses differ by {values['ours'] - values['plain']:.0e}"
    )
    return Row(
        f"sliding, window {window}, {name}", "a window at a time", seconds["ours"] / seconds["plain"], most, note=note
    )


def seconds_of(processes: int, threads: int, windows: int, text: Path, rounds: int = 3) -> float:
    """Of `hf-posenc eval tiny` from start to end, the least of some runs."""
    launch = [sys.executable, "-m", "hf_posenc"]
    if processes > 1:
        config = ["--config_file", str(ROOT / "recipes/accelerate/cpu.yaml"), "--num_processes", str(processes)]
        launch = [sys.executable, "-m", "accelerate.commands.launch", *config, "-m", "hf_posenc"]
    asked = ["eval", "tiny", "--device", "cpu", "--lengths", "1k", "--text", str(text), "--windows", str(windows)]
    given = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        subprocess.run([*launch, *asked], env=given, check=True, capture_output=True)
        found.append(time.perf_counter() - start)
    return min(found)


def processes_row() -> Row:
    """Windows a second, without what it takes to start: two processes of one thread against one of two."""
    few, many = 20, 220
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text("".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))))
        rates = [
            (many - few) / (seconds_of(*how, many, text) - seconds_of(*how, few, text)) for how in ((2, 1), (1, 2))
        ]
    note = f"{rates[0]:.1f} and {rates[1]:.1f} windows of 1024 a second"
    return Row("throughput of two processes of a thread", "one process of two", rates[0] / rates[1], None, note=note)


def main() -> None:
    transformers.logging.set_verbosity_error()
    if sys.argv[1:] == ["--processes"]:
        show([processes_row()])
        return
    if sys.argv[1:2] == ["--memory"]:
        run, length = WAYS[sys.argv[2]], int(sys.argv[3])
        model, ids = toy(64), tokens(length)
        run(model, ids[:64])
        print(extra_memory(partial(run, model, ids)))
        return
    rows = pass_rows()
    rows += [sliding_row(f"hidden {size}", toy(size), tokens(6144), 2048, 1 / 3) for size in (64, 128, 256)]
    if len(sys.argv) == 3:
        path, text = sys.argv[1:]
        model = load(path, dtype=torch.float32).eval()
        (document,) = read_documents([text], AutoTokenizer.from_pretrained(path))
        rows += [sliding_row(Path(path).name, model, document.ids[: 3 * n], n, None) for n in (1024, 2048)]
    show(rows)


if __name__ == "__main__":
    main()
