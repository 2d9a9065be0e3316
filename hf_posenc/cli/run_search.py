"""`hf-posenc search` and `recommend` after their arguments are parsed."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from ..checkpoints.on_disk import config_of, model_of_config
from ..checkpoints.save import save
from ..checkpoints.tokenizers import tokenizer_of
from ..errors import PosencError
from ..evaluation.measures.processes import launched_processes
from ..evaluation.measures.texts import tokenized
from ..patching.patch import patch_model
from ..schemes.base import scheme_from
from ..search.budget import Budget
from ..search.evolution import Round
from ..search.page import page, task_title
from ..search.recommend import recommend
from ..search.search import Found, search
from .run_evaluation import choose_device, load_model


def run_search(
    model: str,
    target: int,
    out: Path,
    texts: dict[str, str],
    scheme: str,
    temperature: str | None,
    fitness: str,
    short_weight: float,
    sizes: dict[str, int],
    seed: int,
    dtype: str,
    device: str | None,
) -> None:
    budget = Budget(**sizes)
    start = scheme_from(scheme, {"target_length": target, "temperature": temperature})
    live, tokenizer = load_model(model, choose_device(device), dtype, None), tokenizer_of(model)
    out.mkdir(parents=True, exist_ok=True)
    found = search(
        live, tokenizer, tokenized(texts, tokenizer), target_length=target, scheme=start, fitness=fitness,
        short_weight=short_weight, budget=budget, seed=seed, out=out / "search.jsonl", tell=progress_printer(budget),
    )  # fmt: skip
    if not launched_processes().first:
        return
    patch_model(live, found.scheme, existing="extend")
    save(live, out)
    if tokenizer is not None:
        tokenizer.save_pretrained(out)
    command = f"hf-posenc eval {out} --lengths {target} --text ... --tasks perplexity,passkey"
    (out / "search.html").write_text(page(found, command), encoding="utf-8")
    print_findings(found, out, command)


def progress_printer(budget: Budget) -> Any:
    """A function that prints the best loss after each round, and the time left."""
    begun, done = time.monotonic(), 0

    def tell(now: Round) -> None:
        nonlocal done
        taken = time.monotonic() - begun
        left = "" if not done else f", about {taken / done * (budget.rounds - done):.0f} s left"
        told = f"round {done} of {budget.rounds}: best loss {now.best:.4f} of {now.tried} candidates{left}"
        print(told, file=sys.stderr, flush=True)
        done += 1

    return tell


def print_findings(found: Found, out: Path, command: str) -> None:
    print(found.sentence)
    for task, length in dict.fromkeys((row.task, row.length) for row in found.rows):
        print(f"\n{task_title(task)} at {length} tokens that did not guide the search:")
        for row in sorted((r for r in found.rows if (r.task, r.length) == (task, length)), key=lambda r: r.value):
            bars = "" if row.stderr is None else f" ± {row.stderr:.4f}"
            print(f"  {row.scheme:<22}{row.value:.4f}{bars}")
    print(f"\n{out} holds the checkpoint, search.jsonl and search.html.\nNext: {command}")


def run_recommend(
    model: str,
    target: int,
    texts: dict[str, str],
    serve: str | None,
    training: bool,
    out: str | None,
    dtype: str,
    device: str | None,
) -> None:
    if not texts:  # the rules need only the config
        skeleton = model_of_config(config_of(model))
        print(recommend(skeleton, target_length=target, serve=serve, training=training, path=model))
        return
    live, tokenizer = load_model(model, choose_device(device), dtype, None), tokenizer_of(model)
    if tokenizer is None:
        raise PosencError(
            f"There is no tokenizer at {model!r} to read text with: leave --text out, or save one there."
        )
    documents = tokenized(texts, tokenizer)
    advice = recommend(
        live, tokenizer, documents, target_length=target, serve=serve, training=training, path=model, out=out,
        tell=lambda text: print(text, file=sys.stderr, flush=True),
    )  # fmt: skip
    print(advice)
