"""Tables of the studies in docs/results: what `tools/study_plans.py` and `tools/study_search.py` measured."""

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hf_posenc.evaluation.measures.retrieval import accuracy

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]
TEMPERED = " with "
"""Between a scheme and its temperature, in the names of arms."""


def read_rows(name: str, results: Path = RESULTS) -> list[Row]:
    """The rows of all files of a study."""
    return [
        json.loads(line)
        for file in sorted(results.glob(f"{name}-*.jsonl"))
        for line in file.read_text(encoding="utf-8").splitlines()
    ]


def figure(rows: Sequence[Row]) -> tuple[float, float]:
    """The mean over seeds, with the larger of two errors: of the mean over seeds, and of the samples themselves.

    Samples are windows of text, the same for all seeds; or passkeys, which are other ones for each seed.
    """
    values = [row["value"] for row in rows]
    over_seeds = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    if rows[0]["task"].startswith("passkey"):
        hits, count = sum(row["value"] * row["n"] for row in rows), sum(row["n"] for row in rows)
        own = accuracy([1.0] * round(hits) + [0.0] * round(count - hits))[1]
    else:
        own = statistics.fmean(row["stderr"] for row in rows)
    return statistics.fmean(values), max(over_seeds, own)


def _by(rows: Iterable[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    found: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        found[tuple(row[key] for key in keys)].append(row)
    return found


def _perplexity(rows: Sequence[Row]) -> str:
    loss, error = figure(rows)
    return f"{math.exp(loss):.1f} ± {math.exp(loss) * error:.1f}"


def _share(rows: Sequence[Row]) -> str:
    value, error = figure(rows)
    return f"{100 * value:.0f} ± {100 * error:.0f} %"


def _loss(rows: Sequence[Row]) -> str:
    return "{:.3f} ± {:.3f}".format(*figure(rows))


def compose_table(results: Path = RESULTS, tempered: bool = False) -> str:
    """Perplexity and passkeys by length: schemes and plans, or temperatures."""
    rows = read_rows("compose", results)
    cells, lengths = _by(rows, "arm", "length", "task"), sorted({row["length"] for row in rows})
    arms = [arm for arm in dict.fromkeys(row["arm"] for row in rows) if (TEMPERED in arm) == tempered]
    if tempered:
        plain = [arm.partition(TEMPERED)[0] for arm in arms[:2]]
        arms = sorted([*plain, *arms], key=lambda arm: arm.partition(TEMPERED)[0])
    lines = ["| perplexity; passkeys at | " + " | ".join(map(str, lengths)) + " |", "|---" * (len(lengths) + 1) + "|"]
    for arm in arms:
        told = [
            f"{_perplexity(cells[arm, length, 'perplexity'])}; {_share(cells[arm, length, 'passkey'])}"
            for length in lengths
        ]
        lines.append(f"| {arm} | {' | '.join(told)} |")
    return "\n".join(lines)


def temperature_table(results: Path = RESULTS) -> str:
    return compose_table(results, tempered=True)


def search_table(results: Path = RESULTS) -> str:
    """Held-out loss and passkeys of searched factors beside published schemes, by model and target."""
    rows = read_rows("search", results)
    lines = [
        "| model, target | positions | loss at the target | loss at the trained length | passkeys written | "
        "passkeys told from 3 others |",
        "|---" * 6 + "|",
    ]
    for (model, factor), found in _by(rows, "model", "factor").items():
        figures = [row for row in found if row["task"] != "search"]
        far = max(row["length"] for row in figures)
        for (arm,), own in _by(figures, "arm").items():
            told = [
                _loss([r for r in own if r["task"] == "loss" and r["length"] == far]),
                _loss([r for r in own if r["task"] == "loss" and r["length"] < far]),
                *(_share([r for r in own if r["task"] == f"passkey, {how}"]) for how in ("generation", "likelihood")),
            ]
            lines.append(f"| {model}, {factor} x | {arm} | {' | '.join(told)} |")
    return "\n".join(lines)


def searches_table(results: Path = RESULTS) -> str:
    """What each search said of itself, and the time that it took."""
    lines = ["| model, target | guided by | seed | samples read | CPU seconds | in its own words |", "|---" * 6 + "|"]
    for row in read_rows("search", results):
        if row["task"] == "search":
            what = row["arm"].removeprefix("searched by ")
            cells = [f"{row['model']}, {row['factor']} x", what, row["seed"], row["read"], round(row["seconds"])]
            lines.append(f"| {' | '.join(map(str, cells))} | {row['sentence']} |")
    return "\n".join(lines)
