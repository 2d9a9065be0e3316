"""The page of a bench: a curve and a table for each task, with error bars, beside what others have published."""

from __future__ import annotations

import html
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from .published import AVERAGES, SOURCE
from .tasks import TITLES

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#000000", "#999933", "#882255")
WIDTH, HEIGHT, LEFT, BELOW = 640, 300, 48, 32
STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}td,th{padding:.2em .6em;text-align:right;border-bottom:1px solid #ddd}"
    "th:first-child,td:first-child{text-align:left}"
)


class Point(NamedTuple):
    mean: float
    error: float
    """The standard error over seeds; 0 where there is one."""
    seeds: int


def point(values: Sequence[float]) -> Point:
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return Point(statistics.fmean(values), error, len(values))


def by_scheme(results: list[dict[str, Any]]) -> dict[str, dict[int, Point]]:
    found: dict[str, dict[int, list[float]]] = {}
    for result in results:
        for length, value in result["by_length"].items():
            found.setdefault(result["scheme"], {}).setdefault(int(length), []).append(value)
    return {name: {n: point(values) for n, values in sorted(of.items())} for name, of in found.items()}


def curves(found: dict[str, dict[int, Point]], trained: int, most: float) -> str:
    """An SVG: a line for each scheme, bars of one standard error, and where training ends."""
    lengths = sorted({n for of in found.values() for n in of})
    first, last = lengths[0], lengths[-1]

    def x(length: float) -> float:
        return LEFT + (WIDTH - LEFT - 130) * (length - first) / max(last - first, 1)

    def y(value: float) -> float:
        return 10 + (HEIGHT - BELOW - 10) * (1 - value / most)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="by length">']
    for share in (0, 0.25, 0.5, 0.75, 1):
        at = y(share * most)
        parts.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - 130}" stroke="#ddd"/>')
        parts.append(
            f'<text x="{LEFT - 6}" y="{at + 4:.1f}" font-size="11" text-anchor="end">{share * most:.2f}</text>'
        )
    for length in lengths:
        parts.append(
            f'<text x="{x(length):.1f}" y="{HEIGHT - 12}" font-size="11" text-anchor="middle">{length}</text>'
        )
    parts.append(f'<path d="M{x(trained):.1f} 10V{HEIGHT - BELOW}" stroke="#888" stroke-dasharray="4 3"/>')
    for number, (name, of) in enumerate(found.items()):
        colour = COLOURS[number % len(COLOURS)]
        line = " ".join(f"{x(n):.1f},{y(p.mean):.1f}" for n, p in of.items())
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        for n, p in of.items():
            top, low = y(min(p.mean + p.error, most)), y(max(p.mean - p.error, 0))
            parts.append(f'<path d="M{x(n):.1f} {top:.1f}V{low:.1f}" stroke="{colour}"/>')
        key = 20 + 16 * number
        parts.append(f'<path d="M{WIDTH - 122} {key}h16" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{WIDTH - 102}" y="{key + 4}" font-size="11">{html.escape(name)}</text>')
    return "".join([*parts, "</svg>"])


def table(task: str, found: dict[str, dict[int, Point]], results: list[dict[str, Any]]) -> str:
    lengths = sorted({n for of in found.values() for n in of})
    theirs = AVERAGES.get(task)
    head = ["scheme", *map(str, lengths), *(["all lengths", "published"] if theirs else [])]
    rows = ["".join(f"<th>{cell}</th>" for cell in head)]
    for name, of in found.items():
        cells = [html.escape(name)]
        cells += [f"{of[n].mean:.2f} ± {of[n].error:.2f}" if n in of else "-" for n in lengths]
        if theirs:
            means = [
                statistics.fmean(r["by_length"].values()) for r in results if r["scheme"] == name and r["task"] == task
            ]
            cells += [f"{statistics.fmean(means):.2f}", f"{theirs[name]:.2f}" if name in theirs else "-"]
        rows.append("".join(f"<td>{cell}</td>" for cell in cells))
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in rows) + "</table>"


def conditions(results: list[dict[str, Any]]) -> str:
    first = results[0]
    s, seeds = first["settings"], len({r["seed"] for r in results})
    cost = statistics.fmean(r["cpu_seconds"] for r in results)
    return (
        f"{s['layers']} layers of {s['hidden']}, {first['parameters']:,} parameters, {s['steps']} steps of "
        f"{s['batch']}; "
        f"{seeds} seeds, bars are standard errors over them; {cost:.0f} seconds of one core for a run."
    )


def page(results: list[dict[str, Any]]) -> str:
    """All of it as one HTML file. Results of other settings are shown apart."""
    parts = ["<!doctype html><meta charset=utf-8><title>Length generalisation</title>", f"<style>{STYLE}</style>"]
    parts.append("<h1>Length generalisation</h1>")
    kinds: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for result in results:
        kinds.setdefault((result["task"], str(result["settings"])), []).append(result)
    for (task, _), group in sorted(kinds.items()):
        found, text = by_scheme(group), task == "stdlib"
        trained = group[0]["settings"]["row" if text else "longest"]
        most = max(p.mean for of in found.values() for p in of.values()) if text else 1.0
        what = "Loss by bytes of a row" if text else "Exact match by length"
        parts.append(
            f"<h2>{TITLES[task]}</h2><p>{what}; trained up to {trained}, the dashed line. {conditions(group)}</p>"
        )
        parts += [curves(found, trained, most), table(task, found, group)]
    parts.append(
        f"<p>Published: {SOURCE}. Models of other sizes, trained for longer: compare orders, not numbers.</p>"
    )
    return "\n".join(parts)
