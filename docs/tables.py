"""`make docs`: write the tables of the documentation anew from what they speak of."""

import json
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

from real_models import encoders_table, losses_table, passkeys_table, tuning_table
from serving_cells import cells_table
from studies import compose_table, search_table, searches_table, temperature_table

from hf_posenc.engines.markdown import runtimes_markdown
from hf_posenc.patching.grades import table_markdown
from hf_posenc.search.rules import rules_markdown
from hf_posenc.training.recipe_keys import keys_markdown

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"


def speed_table(results: Path = RESULTS) -> str:
    """What `benchmarks/speed.py` found, as Markdown: schemes that share a goal in one row."""
    lines = []
    for file in sorted(results.glob("speed-*.json")):
        groups = json.loads(file.read_text(encoding="utf-8"))["groups"]
        for how, found in groupby(groups.values(), lambda group: _conditions(group["conditions"])):
            rows = [row for group in found for row in group["rows"]]
            lines += ["", how + ":", "", "| what | scheme | before | goal | measured |", "|---|---|---|---|---|"]
            lines += [_line(list(alike)) for _, alike in groupby(rows, _kind)]
    return "\n".join(lines[1:])


def _conditions(found: dict[str, Any]) -> str:
    clock = {"wall": "", "cpu": ", time that the process had on a busy machine"}[found["clock"]]
    threads = f", {found['threads']} thread{'s' * (found['threads'] > 1)}" if found["device"] == "cpu" else ""
    versions = f"torch {found['torch']}, transformers {found['transformers']}"
    return f"{found['device']} ({found['machine']}{threads}{clock}), {versions}"


def _kind(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[key] for key in ("what", "length", "variant", "unit", "goal"))


def _line(rows: list[dict[str, Any]]) -> str:
    what, length, variant, unit, goal = _kind(rows[0])
    before = [row["before"] for row in rows]
    cells = [
        f"{what} {length}{', ' + variant if variant else ''}: {unit}",
        " / ".join(f"`{row['scheme']}`" for row in rows),
        "" if not any(before) else " / ".join("-" if x is None else f"{x:.2f}" for x in before),
        "" if goal is None else f"{goal:.2f}",
        " / ".join(_measured(row["measured"], goal) for row in rows),
    ]
    return f"| {' | '.join(cells)} |"


def _measured(value: float, goal: float | None) -> str:
    return f"{value:.2f}" if goal is None or value <= goal else f"**{value:.2f}**"


def long_rows_table(results: Path = RESULTS) -> str:
    """What `benchmarks/long_rows.py` found, as Markdown."""
    ways = json.loads((results / "long-rows.json").read_text(encoding="utf-8"))["ways"]
    plain = ways.pop("plain")
    lines = [
        "| tokens | way | memory | time | gradients apart |",
        "|---|---|---|---|---|",
    ]
    for length in (key for key in plain if key.isdigit()):
        for way, found in ways.items():
            row, other = found[length], plain[length]["megabytes"]
            memory = f"{row['megabytes']:.0f} of {other:.0f} MB ({row['megabytes / plain']:.2f})"
            time, apart = f"{row['seconds / plain']:.2f}", f"{row['gradients apart']:.0e}"
            lines.append(f"| {int(length):,} | {way} | {memory} | {time} | {apart} |")
    reach = {way: found["tokens in 8 GB"] for way, found in {"plain": plain, **ways}.items()}
    told = ", ".join(f"{way} {tokens / 1000:.0f}k" for way, tokens in reach.items())
    return "\n".join([*lines, "", f"Tokens of a row in 8 GB, by a straight line through both lengths: {told}."])


TABLES: tuple[tuple[str, str, Callable[[], str]], ...] = (
    ("docs/compose.md", "plans", compose_table),
    ("docs/compose.md", "temperatures", temperature_table),
    ("docs/costs.md", "long-rows", long_rows_table),
    ("docs/costs.md", "speed", speed_table),
    ("docs/recipe_keys.md", "keys", keys_markdown),
    ("docs/schemes/README.md", "table", table_markdown),
    ("docs/search.md", "rules", rules_markdown),
    ("docs/search.md", "searched", search_table),
    ("docs/search.md", "searches", searches_table),
    ("docs/serving.md", "cells", cells_table),
    ("docs/serving.md", "runtimes", runtimes_markdown),
    ("docs/study.md", "encoders", encoders_table),
    ("docs/study.md", "losses", losses_table),
    ("docs/study.md", "passkeys", passkeys_table),
    ("docs/study.md", "tuning", tuning_table),
)
"""Files, the mark of a table in each, and what makes it."""


def write_table(file: Path, mark: str, table: str) -> None:
    """Put a table between its marks in a file."""
    begin, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    before, _, rest = file.read_text(encoding="utf-8").partition(begin)
    after = rest.partition(end)[2]
    file.write_text(f"{before}{begin}\n{table}\n{end}{after}", encoding="utf-8")


def main() -> None:
    for name, mark, made in TABLES:
        if (ROOT / name).exists():
            write_table(ROOT / name, mark, made())


if __name__ == "__main__":
    main()
