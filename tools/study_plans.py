"""DroPE and SWAN against schemes that need no training, and against YaRN tuned with the same budget, on `tiny`.

    python tools/study_plans.py --out build/study [--seeds 3] [--only drope]

Trains what is to be trained (a tenth of the pretraining's steps each), measures perplexity and passkeys at 1, 2, 4 and
8 times the trained length. Seeds draw the rows of training and the passkeys; windows of text are the same for all. A
run that was interrupted goes on: trained models are in the folder, rows in rows.jsonl. `make docs` makes the tables of
docs/compose.md from the rows in docs/results.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from hf_posenc import load, patch_model
from hf_posenc.evaluation import Document, Options, Reading, Retrieval, evaluate, tokenized
from hf_posenc.models import model_path
from hf_posenc.training.stdlib import stdlib_texts

LENGTHS = (256, 512, 1024, 2048)
UNPATCHED = "unpatched"
REACH = 2560
"""What schemes are made for: a quarter more than is read, since they are weakest at their end."""
TEMPERATURES = ("log", "llama4 floor=256", "ministral", "drope", "drope c=0.412", "ssmax")


@dataclass(frozen=True)
class Arm:
    """One line of the table: what is trained, and how the result is patched before it is read."""

    recipe: str | None = None
    words: tuple[str, ...] = ()
    scheme: str | None = None
    """None leaves the model as it was trained."""
    options: dict[str, Any] = field(default_factory=dict)


def arms() -> dict[str, Arm]:
    far = {"target_length": REACH}
    found = {"unpatched": Arm()}
    found |= {scheme: Arm(scheme=scheme, options=far) for scheme in ("ntk", "yarn", "self_extend")}
    budget = "--train.max_steps=160"  # as many tokens as the others: 4 rows of 1024 instead of 8 of 256
    found["yarn, LoRA"] = Arm("tiny_yarn", (budget,))
    found["drope, untrained"] = Arm(scheme="none", options=far)
    found["drope"] = Arm("tiny_drope", scheme="none", options=far)
    found["swan, untrained"] = Arm(scheme="swan", options={**far, "window": 64})
    found["swan"] = Arm("tiny_swan")
    for kind in TEMPERATURES:
        found[f"drope with {kind}"] = Arm("tiny_drope", scheme="none", options={**far, "temperature": kind})
        found[f"yarn with {kind}"] = Arm(scheme="yarn", options={**far, "temperature": kind})
    return found


def train_arm(arm: Arm, seed: int, folder: Path, more: list[str]) -> str:
    """The folder of the arm's model; trains it where it is not there yet, or goes on where a run was cut off."""
    if arm.recipe is None:
        return "tiny"
    output = folder / f"{arm.recipe}-{seed}"
    done = output / "metrics.json"
    if not done.exists():
        resume = ["--resume"] if any(output.glob("checkpoint-*")) else []
        words = [f"--output={output}", f"--train.seed={seed}", "--measure={lengths: [256], windows: 4}"]
        command = [sys.executable, "-m", "hf_posenc.training", arm.recipe, *words, *arm.words, *more, *resume]
        subprocess.run(command, check=True)
    return str(output / ("adapter" if (output / "adapter").exists() else "model"))


def measure_arm(
    arm: Arm, path: str, seed: int, documents: list[Document], windows: int, trials: int
) -> Iterator[dict]:
    """Rows of an arm. Windows of text are the same for all seeds, so what is not trained reads them once."""
    model, tokenizer = load(path, dtype=torch.float32), AutoTokenizer.from_pretrained(model_path("tiny"))
    if arm.scheme is not None:
        patch_model(model, arm.scheme, **arm.options)
    options = Options(
        lengths=LENGTHS,
        tasks=("perplexity", "passkey") if arm.recipe or not seed else ("passkey",),
        reading=Reading(windows=windows),
        asked=Retrieval(trials=trials, distractors=1, seed=seed),
    )
    as_it_came, hits = arm.recipe is None and arm.scheme is None, defaultdict(list)
    for row in evaluate(model, tokenizer, documents, options=options, quiet=True):
        if row.length not in LENGTHS or (row.scheme == UNPATCHED) != as_it_came:
            continue  # the unpatched model beside a patched one, for what its patch costs in the short
        told = {"task": row.task, "length": row.length, "value": row.value, "n": row.n}
        if (row.task, row.metric) == ("perplexity", "loss"):
            yield {**told, "stderr": row.stderr}
        elif (row.task, row.protocol) == ("passkey", "generation"):
            hits[row.length].append(told)
    for length, depths in hits.items():  # as many trials at each depth
        count, value = sum(told["n"] for told in depths), statistics.fmean(told["value"] for told in depths)
        yield {"task": "passkey", "length": length, "value": value, "n": count}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/study"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="arms whose name has this word")
    parser.add_argument("--windows", type=int, default=48)
    parser.add_argument("--trials", type=int, default=10, help="at each of five depths")
    parser.add_argument("--train", nargs="*", default=[], help="more words for the recipes, such as train.max_steps=2")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    file = asked.out / "rows.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    tokenizer = AutoTokenizer.from_pretrained(model_path("tiny"))
    documents = [d for d in tokenized(stdlib_texts(held_out=True), tokenizer) if len(d.ids) >= 2 * max(LENGTHS)]
    for seed in range(asked.seeds):
        for name, arm in arms().items():
            if asked.only not in name or any((row["arm"], row["seed"]) == (name, seed) for row in rows):
                continue
            path = train_arm(arm, seed, asked.out, [f"--{word}" for word in asked.train])
            found = [
                {"arm": name, "seed": seed, **row}
                for row in measure_arm(arm, path, seed, documents, asked.windows, asked.trials)
            ]
            with file.open("a", encoding="utf-8") as out:
                out.write("".join(json.dumps(row) + "\n" for row in found))
            rows += found


if __name__ == "__main__":
    main()
