"""Searched factors against published schemes, on text and passkeys that no search saw.

    python tools/study_search.py tiny --text 'books/*.txt' --out build/search --factors 4 8 [--seeds 3]
    python tools/study_search.py path/to/stories15M --text 'books/*.txt' --out build/search --factors 4

Each search (guided by loss, and by needles) is run with several seeds; what it found is measured beside yarn, ntk,
llama3 and dynamic_ntk on the same held-out windows, and on passkeys of a seed of their own. A run that was interrupted
goes on: searches are kept in the folder, rows in rows-MODEL.jsonl. `make docs` makes the tables of docs/search.md from
the rows in docs/results.
"""

import argparse
import json
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from hf_posenc import UntrainedWarning, load, patch_model, unpatch_model
from hf_posenc.evaluation import Document, Retrieval, tokenized
from hf_posenc.evaluation.measures.estimates import mean_and_error
from hf_posenc.evaluation.measures.retrieval import retrieval
from hf_posenc.evaluation.measures.text_files import read_texts
from hf_posenc.evaluation.measures.texts import bos_of
from hf_posenc.models import model_path
from hf_posenc.patching.lengths import trained_length
from hf_posenc.search import Budget, search
from hf_posenc.search.samples import FITNESSES, sample_losses, split, text_samples
from hf_posenc.training.stdlib import stdlib_texts

KNOWN: dict[str, dict[str, Any]] = {"yarn": {}, "ntk": {"alpha": "cover"}, "llama3": {}, "dynamic_ntk": {}}
FRESH = 1_000_000
"""Added to the seed of passkeys, so that they are none that a search saw."""


class Study:
    """One model with the text that it is searched and judged on."""

    def __init__(self, path: str, texts: dict[str, str], budget: Budget, trials: int):
        self.name, self.budget, self.trials = Path(path).name, budget, trials
        self.model = load(path, dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(model_path(path))
        self.documents: list[Document] = tokenized(texts, self.tokenizer)
        self.trained = trained_length(self.model)

    def found(self, target: int, fitness: str, seed: int, log: Path) -> dict[str, Any]:
        """A search, as a row; `seconds` are those that the process worked, one thread."""
        begun = time.process_time()
        made = search(
            self.model, self.tokenizer, self.documents, target_length=target, fitness=fitness, budget=self.budget,
            seed=seed, out=log,
        )  # fmt: skip
        told = {"start": made.start, "improved": made.improved, "sentence": made.sentence}
        spent = {"read": made.rounds[-1].read, "seconds": time.process_time() - begun}
        return {**told, **spent, "options": made.scheme.options()}

    def figures(self, target: int, scheme: str, options: dict[str, Any], seed: int) -> Iterator[dict[str, Any]]:
        """Held-out loss at the target and at the trained length, and passkeys at the target."""
        patch_model(self.model, scheme, **options)
        bos = bos_of(self.tokenizer, None)
        judging = split(self.documents, target)[1]
        for length in (self.trained, target):
            losses = sample_losses(self.model, text_samples(judging, length, self.budget.held_out, bos))
            value, error = mean_and_error(losses)
            yield {"task": "loss", "length": length, "value": value, "stderr": error, "n": len(losses)}
        asked = Retrieval(trials=self.trials, distractors=3, seed=FRESH + seed)
        found = retrieval(self.model, self.tokenizer, "passkey", target, asked=asked)
        for protocol in ("generation", "likelihood"):
            rows = [row for row in found if row.protocol == protocol]
            count = sum(row.n for row in rows)
            value = sum(row.value * row.n for row in rows) / count
            yield {"task": f"passkey, {protocol}", "length": target, "value": value, "n": count}
        unpatch_model(self.model)

    def rows(self, factor: int, seed: int, folder: Path, done: set[tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
        """Of one target and one seed, but for what is kept already."""
        target = factor * self.trained
        known = {name: (name, {**options, "target_length": target}) for name, options in KNOWN.items()}
        arms: dict[str, tuple[str, dict[str, Any]] | None] = {**known, **{f"searched by {f}": None for f in FITNESSES}}
        for arm, given in arms.items():
            where = {"model": self.name, "factor": factor, "arm": arm, "seed": seed}
            if tuple(where.values()) in done:
                continue
            if given is None:
                fitness = arm.removeprefix("searched by ")
                log = folder / f"{self.name}-{factor}-{fitness}-{seed}.jsonl"
                made = self.found(target, fitness, seed, log)
                yield {**where, "task": "search", **made, "budget": vars(self.budget)}
                given = ("longrope", made["options"])
            for figure in self.figures(target, *given, seed):
                yield {**where, **figure}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", nargs="*", default=[], help="files, folders or patterns; the library's own for none")
    parser.add_argument("--out", type=Path, default=Path("build/search"))
    parser.add_argument("--factors", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--trials", type=int, default=4, help="at each of five depths")
    for name in ("population", "parents", "rounds", "samples", "held_out"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Budget(), name))
    asked = parser.parse_args()
    warnings.simplefilter("ignore", UntrainedWarning)
    asked.out.mkdir(parents=True, exist_ok=True)
    budget = Budget(**{name: getattr(asked, name) for name in vars(Budget())})
    texts = read_texts(asked.text) if asked.text else stdlib_texts(held_out=True)
    study = Study(asked.model, texts, budget, asked.trials)
    file = asked.out / f"rows-{study.name}.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    last = [json.loads(line) for line in lines if '"passkey, likelihood"' in line]  # what an arm ends with
    done = {(row["model"], row["factor"], row["arm"], row["seed"]) for row in last}
    for factor in asked.factors:
        for seed in range(asked.seeds):
            for row in study.rows(factor, seed, asked.out, done):
                with file.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(row) + "\n")
                print(json.dumps(row))


if __name__ == "__main__":
    main()
