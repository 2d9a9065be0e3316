"""Measure a `tiny` checkpoint: what it reads, where it ends, and how far each scheme carries it without training.

    python tools/score_tiny.py tiny

Perplexity of the last 64 tokens of windows from texts that were held out; passkeys that are written, strictly: the
first integer must be the key. Ends with an error where a bar is missed.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from hf_posenc import load
from hf_posenc.evaluation import Document, Options, Reading, Retrieval, Row, compare, tokenized
from hf_posenc.models import model_path
from hf_posenc.training.stdlib import stdlib_texts

LENGTHS = (128, 256, 512, 1024)
REACH = 1280
"""What schemes are made for: a quarter more than is read, since they are weakest at their end."""
SCHEMES = "linear,ntk,dynamic_ntk:factor=5,yarn,llama3,self_extend"
Figures = dict[tuple[str, int], tuple[float, float]]
"""Perplexity and share of passkeys, by scheme and length."""


def held_out(tokenizer: Any) -> list[Document]:
    """The unseen texts that have room for several windows."""
    documents = tokenized(stdlib_texts(held_out=True), tokenizer)
    return [document for document in documents if len(document.ids) >= 2 * max(LENGTHS)]


def figures_of(rows: Sequence[Row]) -> Figures:
    losses = {(row.scheme, row.length): row.value for row in rows if (row.task, row.metric) == ("perplexity", "loss")}
    shares: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        if (row.task, row.protocol) == ("passkey", "generation"):
            shares.setdefault((row.scheme, row.length), []).append(row.value)
    return {key: (math.exp(loss), sum(shares[key]) / len(shares[key])) for key, loss in losses.items()}


def bars(figures: Figures) -> list[tuple[str, float, str, float]]:
    """What is measured, its figure, and the least or most that it may be."""
    inside, inside_keys = figures["unpatched", 256]
    twice, twice_keys = figures["unpatched", 512]
    found = [
        ("perplexity at 256", inside, "<=", 11.0),
        ("passkeys at 256", inside_keys, ">=", 0.95),
        ("perplexity at 512, of that at 256", twice / inside, ">=", 2.0),
        ("passkeys at 512", twice_keys, "<=", 0.2),
        ("passkeys at 1024", figures["unpatched", 1024][1], "<=", 0.05),
    ]
    if ("yarn", 1024) in figures:
        found.append(
            ("yarn, perplexity at 1024, of the unpatched at 256", figures["yarn", 1024][0] / inside, "<=", 1.15)
        )
    return found


def is_met(value: float, sign: str, limit: float) -> bool:
    return value <= limit if sign == "<=" else value >= limit


def show(path: str, figures: Figures) -> None:
    table = Table("perplexity / passkeys", *map(str, LENGTHS), title=path)
    for scheme in dict.fromkeys(scheme for scheme, _ in figures):
        cells = [f"{figures[scheme, n][0]:.2f} / {figures[scheme, n][1]:.1%}" for n in LENGTHS]
        table.add_row(scheme, *cells)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a checkpoint")
    parser.add_argument("--schemes", default=SCHEMES, help="beside the unpatched model")
    parser.add_argument("--windows", type=int, default=96)
    parser.add_argument("--trials", type=int, default=40, help="at each of five depths")
    parser.add_argument("--json", help="write the figures there")
    asked = parser.parse_args()
    model, tokenizer = load(asked.model, dtype=torch.float32), AutoTokenizer.from_pretrained(model_path(asked.model))
    options = Options(
        lengths=LENGTHS,
        tasks=("perplexity", "passkey"),
        reading=Reading(windows=asked.windows),
        asked=Retrieval(trials=asked.trials, distractors=1),
    )
    rows = compare(
        model, tokenizer, asked.schemes, held_out(tokenizer), target_length=REACH, options=options, quiet=False
    )
    figures = figures_of(rows)
    show(asked.model, figures)
    if asked.json:
        named = {f"{scheme}/{length}": values for (scheme, length), values in figures.items()}
        Path(asked.json).write_text(json.dumps(named, indent=2) + "\n", encoding="utf-8")
    missed = []
    for what, value, sign, limit in bars(figures):
        kept = is_met(value, sign, limit)
        missed += [what] * (not kept)
        print(f"{what}: {value:.3f} (must be {sign} {limit:g}){'' if kept else ' MISSED'}")
    sys.exit(f"missed: {', '.join(missed)}" if missed else 0)


if __name__ == "__main__":
    main()
