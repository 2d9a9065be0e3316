"""A training step on one long row, against plain Trainer + PEFT with gradient checkpointing.

    python benchmarks/long_rows.py [--lengths 8192,16384] [--out docs/results/long-rows.json]

Both train the same tensors of the same model on the same rows: LoRA on attention, norms and embeddings. Every way and
length has a process of its own on one thread; time is what its last step takes of the CPU, memory the peak above
what the imports left, so that weights, moments and activations are all in it, and freed memory that the system keeps.
Beside it stand what tensors take of it, by torch's own count in another process, and what `--dry-run` says of that.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

VOCAB = 49_152
CONFIG = dict(
    model_type="llama", vocab_size=VOCAB, hidden_size=128, num_hidden_layers=4, num_attention_heads=2,
    num_key_value_heads=1, intermediate_size=512, max_position_embeddings=2048, tie_word_embeddings=True,
)  # fmt: skip
PLAIN = "plain"
WAYS: dict[str, list[str]] = {
    PLAIN: [],
    "ours": [],
    "ours, least memory": ["--train.recompute_attention=true", "--train.mlp_tokens=1024"],
}
LIMIT = 8e9


def megabytes(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))


def counted(train: Any) -> float:
    """Megabytes that tensors take at most, beside those that were there before."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as watched:
        train()
    told = [event for event in watched.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(told, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most / 2**20


def measured(way: str, length: int, folder: Path, steps: int, count: bool) -> dict[str, float]:
    """Runs in a process of its own."""
    import torch
    from transformers import Trainer, TrainerCallback, default_data_collator

    from hf_posenc.training import recipe
    from hf_posenc.training.estimate import estimate_step
    from hf_posenc.training.settings_file import read_settings
    from hf_posenc.training.tuning import choose_trainable

    torch.set_num_threads(1)
    base = megabytes("VmRSS")
    words = [
        f"--model.path={folder / 'model'}", "--model.tokenizer=tiny", f"--data.path={folder / 'text.txt'}",
        f"--data.length={length}", f"--scheme={{name: yarn, target_length: {length}}}", "--data.documents=joined",
        f"--train={{max_steps: {steps}, gradient_checkpointing: true, logging_steps: 1, use_cpu: true}}",
        f"--measure={{lengths: [{length}], windows: 1}}", f"--output={folder / 'out'}", "--data.passkey=0.0",
    ]  # fmt: skip
    run = recipe.prepare(read_settings("tiny_yarn", [*words, *WAYS[way]]))
    estimated = estimate_step(run.model, run.settings).peak / 2**20
    trainer: Any
    if way == PLAIN:
        torch.manual_seed(run.settings.train.seed)
        run.args.gradient_checkpointing, run.args.gradient_checkpointing_kwargs = True, {"use_reentrant": False}
        trainer = Trainer(
            model=choose_trainable(run.model, run.settings.tune, "causal"), args=run.args, train_dataset=run.rows,
            data_collator=default_data_collator,
        )  # fmt: skip
    else:
        trainer = recipe.make_trainer(run)
    seconds: list[float] = []
    gradients: list[Any] = []

    class Watch(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            seconds.append(-time.process_time())

        def on_pre_optimizer_step(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
            seconds[-1] += time.process_time()
            if len(seconds) == 1:
                gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad})

    trainer.save_model = trainer._save_checkpoint = lambda *args, **kwargs: None
    if count:
        held = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in trainer.model.parameters()}
        return {"tensors": sum(held.values()) / 2**20 + counted(trainer.train), "estimated": estimated}
    trainer.add_callback(Watch())
    trainer.train()
    peak = megabytes("VmHWM")
    torch.save(gradients[0], folder / f"{way}-{length}.pt")
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"megabytes": peak - base, "imports": base, "seconds": seconds[-1], "loss": losses[-1]}


def apart(folder: Path, way: str, length: int) -> float:
    """The largest difference of a gradient, over the largest gradient of its tensor."""
    import torch

    own, plain = (torch.load(folder / f"{name}-{length}.pt") for name in (way, PLAIN))
    assert own.keys() == plain.keys()
    return max(float((own[n] - plain[n]).abs().max() / plain[n].abs().max().clamp(min=1e-12)) for n in own)


def prepare(folder: Path, longest: int) -> None:
    import random

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = dict(CONFIG)
    config = AutoConfig.for_model(str(sizes.pop("model_type")), **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(4000)]
    (folder / "text.txt").write_text(" ".join(rng.choice(words) for _ in range(8 * longest)))


def reach(figures: dict[int, float], limit: float) -> float:
    """Tokens of a row that fit: memory grows in a straight line between the two longest."""
    (short, less), (long, more) = sorted(figures.items())[-2:]
    return long + (limit - more) * (long - short) / (more - less)


def conditions() -> dict[str, Any]:
    import platform

    import peft
    import torch
    import transformers

    versions = {module.__name__: module.__version__ for module in (torch, transformers, peft)}
    return {"machine": platform.machine(), "threads": 1, "clock": "cpu", "dtype": "float32", **versions, **CONFIG}


def in_a_process(words: list[str]) -> dict[str, float]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    told = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True, env=environment)
    if told.returncode:
        raise RuntimeError(told.stderr)
    answer: dict[str, float] = json.loads(told.stdout.splitlines()[-1])
    return answer


def report(folder: Path, lengths: list[int], ways: list[str], steps: int = 2) -> dict[str, Any]:
    prepare(folder, max(lengths))
    found: dict[str, Any] = {}
    for length in lengths:
        for way in ways:
            words = ["--way", way, "--lengths", str(length), "--folder", str(folder), "--steps", str(steps)]
            row = found.setdefault(way, {})[str(length)] = in_a_process(words)
            if way != PLAIN:
                row |= in_a_process([*words, "--count"])
            if way != PLAIN and PLAIN in found:
                plain = found[PLAIN][str(length)]
                row |= {key + " / plain": row[key] / plain[key] for key in ("megabytes", "seconds")}
                row["gradients apart"] = apart(folder, way, length)
            print(way, length, row, flush=True)
    for by_length in found.values():
        if len(by_length) > 1:
            sizes = {int(n): row["megabytes"] + row["imports"] for n, row in by_length.items()}
            by_length["tokens in 8 GB"] = reach(sizes, LIMIT / 2**20)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default="8192,16384")
    parser.add_argument("--ways", default=";".join(WAYS))
    parser.add_argument("--steps", type=int, default=2, help="the last is timed")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--way")
    parser.add_argument("--count", action="store_true")
    parser.add_argument("--folder", type=Path)
    asked = parser.parse_args()
    lengths = [int(part) for part in asked.lengths.split(",")]
    if asked.way:
        print(json.dumps(measured(asked.way, lengths[0], asked.folder, asked.steps, asked.count)))
        return
    with tempfile.TemporaryDirectory() as folder:
        found = report(Path(folder), lengths, asked.ways.split(";"), asked.steps)
    if asked.out:
        asked.out.write_text(json.dumps({"conditions": conditions(), "ways": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
