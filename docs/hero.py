"""`make docs`: the README's chart, drawn from the table of docs/demo.md."""

from __future__ import annotations

from pathlib import Path

from plots import Axis, Curve, chart

HERE = Path(__file__).parent
SHOWN = {"unpatched": "unpatched", "`yarn`, untrained": "yarn", "LoRA on `yarn`, 40 steps": "yarn, tuned"}
"""Rows of the table, and what the chart calls them."""


def figures() -> tuple[list[float], dict[str, list[float]]]:
    """Lengths, and the perplexity at each of them by row."""
    lines = (HERE / "demo.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    lengths = [float(length) for length in rows[0][1:]]
    return lengths, {row[0]: [float(cell.partition("/")[0]) for cell in row[1:]] for row in rows[2:]}


def draw() -> str:
    lengths, found = figures()
    curves = [Curve(name, lengths, found[row]) for row, name in SHOWN.items()]
    title = "Trained at 256 tokens: what happens past that, and after one line"
    x, y = Axis("length of the text, tokens"), Axis("perplexity (lower is better)", low=0)
    return chart(title, "Perplexity of tiny by length, from the table of the demo.", curves, x, y, {})


if __name__ == "__main__":
    (HERE / "hero.svg").write_text(draw(), encoding="utf-8")
