"""The tables and curves of docs/bench.md, from the kept results of `hf-posenc bench length-generalisation`."""

from pathlib import Path
from typing import Any

from hf_posenc.training.length_bench.page import by_task, introduction, rows, task_curves
from hf_posenc.training.length_bench.runs import read_results
from hf_posenc.training.length_bench.tasks import ALPHABET, TITLES

DOCS = Path(__file__).parent
RESULTS = DOCS / "results" / "length-generalisation.jsonl"
BEGIN, END = "<!-- bench -->", "<!-- /bench -->"
SHOWN = (10, 20, 22, 26, 30, 34, 40, 60, 256, 512, 1024, 2048, 4096)
"""Lengths of the tables; the curves have all of them."""


def name_of(group: list[dict[str, Any]]) -> str:
    """The file of a curve."""
    s = group[0]["settings"]
    letters = f"-{s['alphabet']}" if s["alphabet"] != ALPHABET else ""
    return f"{group[0]['task']}{letters}-{s['layers']}-{s['steps']}.svg"


def heading(group: list[dict[str, Any]]) -> str:
    task, s = group[0]["task"], group[0]["settings"]
    letters = f" {s['alphabet']} tokens" if s["alphabet"] != ALPHABET else ""
    return f"### {TITLES[task].capitalize()}{letters}, {s['layers']} layers, {s['steps']} steps"


def bench_markdown(results: Path = RESULTS) -> str:
    """A heading, the conditions, a curve and a table for each task."""
    parts = []
    for group in by_task(read_results(results)):
        task = group[0]["task"]
        head, *others = rows(task, group, SHOWN)
        lines = [" | ".join(head), "|".join(["---"] * len(head))]
        lines += [" | ".join([f"`{name}`", *cells]) for name, *cells in others]
        parts += [
            heading(group),
            introduction(group),
            f"![{TITLES[task]}, by length](bench/{name_of(group)})",
        ]
        parts.append("\n".join(f"|{line}|" for line in lines))
    return "\n\n".join(parts)


def pictures(results: Path = RESULTS) -> dict[str, str]:
    """The curve of each task by its file name."""
    return {name_of(group): task_curves(group) + "\n" for group in by_task(read_results(results))}


def main() -> None:
    page = DOCS / "bench.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{bench_markdown()}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    for name, drawn in pictures().items():
        (DOCS / "bench" / name).write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
