"""The page of a bench: a curve and a table for each task, with error bars, beside what others have published."""

from __future__ import annotations

import html
import json
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from .published import AVERAGES, FARTHEST, SOURCE
from .tasks import ALPHABET, TASKS, TITLES

STDLIB = "stdlib"
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

    def __str__(self) -> str:
        return f"{self.mean:.2f} ± {self.error:.2f}" if self.seeds > 1 else f"{self.mean:.2f}"


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

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" role="img" aria-label="by length">'
    ]
    for share in (0, 0.25, 0.5, 0.75, 1):
        at = y(share * most)
        parts.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - 130}" stroke="#ddd"/>')
        parts.append(
            f'<text x="{LEFT - 6}" y="{at + 4:.1f}" font-size="11" text-anchor="end">{share * most:.2f}</text>'
        )
    last_label = -99.0
    for length in lengths:
        if x(length) - last_label < 22:  # no room for its number
            continue
        last_label = x(length)
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


def mean_past_training(results: list[dict[str, Any]]) -> dict[str, Point]:
    """Exact match of each scheme past the trained lengths, as far as others have tested, over seeds."""
    found: dict[str, list[float]] = {}
    for result in results:
        trained, of = result["settings"]["longest"], result["by_length"]
        beyond = [value for length, value in of.items() if trained < int(length) <= FARTHEST]
        found.setdefault(result["scheme"], []).append(statistics.fmean(beyond or [0.0]))
    return {name: point(values) for name, values in found.items()}


def rows(task: str, results: list[dict[str, Any]], only: Sequence[int] = ()) -> list[list[str]]:
    """A table, its head first: a scheme in a row, a length in a column. `only`: these lengths."""
    found = by_scheme(results)
    lengths = [n for n in sorted({n for of in found.values() for n in of}) if not only or n in only]
    head = ["scheme", *map(str, lengths)]
    averages = mean_past_training(results) if task in TASKS else {}
    theirs = AVERAGES.get(task, {})
    if averages:
        head.append(f"past {results[0]['settings']['longest']}, to {FARTHEST}")
    made = [[*head, *(["published"] if theirs else [])]]
    for name, of in found.items():
        cells = [str(of[n]) if n in of else "-" for n in lengths]
        cells += [str(averages[name])] if averages else []
        cells += [f"{theirs[name]:.2f}" if name in theirs else "-"] if theirs else []
        made.append([name, *cells])
    return made


def table(task: str, results: list[dict[str, Any]]) -> str:
    head, *others = rows(task, results)
    lines = ["".join(f"<th>{cell}</th>" for cell in head)]
    lines += ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in others]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def conditions(results: list[dict[str, Any]]) -> str:
    first = results[0]
    s, seeds = first["settings"], len({r["seed"] for r in results})
    cost = statistics.fmean(r["cpu_seconds"] for r in results)
    bars = f"{seeds} seeds, bars are standard errors over them" if seeds > 1 else "one seed"
    batch = f"{max(s['batch'] // 8, 1)} rows" if first["task"] == STDLIB else f"{s['batch']}"
    batch += " of about one length" if s["bucket"] > 1 else ""
    letters = f"an alphabet of {s['alphabet']}, " if s["alphabet"] != ALPHABET else ""
    return (
        f"{s['layers']} layers of {s['hidden']}, {first['parameters']:,} parameters, {letters}{s['steps']} steps of "
        f"{batch} at {s['learning_rate']:g}; {bars}; {cost:.0f} seconds of one core for a run, "
        f"{cost * len(results) / 60:.0f} minutes for all {len(results)}."
    )


def by_task(results: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Results that belong together: of one task, and of the same settings."""
    kinds: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for result in results:
        kinds.setdefault((list(TITLES).index(result["task"]), json.dumps(result["settings"])), []).append(result)
    return [group for _, group in sorted(kinds.items())]


def task_curves(results: list[dict[str, Any]]) -> str:
    """The curves of one task."""
    found, text = by_scheme(results), results[0]["task"] == STDLIB
    trained = results[0]["settings"]["row" if text else "longest"]
    most = max(p.mean for of in found.values() for p in of.values()) if text else 1.0
    return curves(found, trained, most)


def introduction(results: list[dict[str, Any]]) -> str:
    """What is measured, and how."""
    s, text = results[0]["settings"], results[0]["task"] == STDLIB
    what, trained = ("Loss by bytes of a row", s["row"]) if text else ("Exact match by length", s["longest"])
    return f"{what}; trained up to {trained}, the dashed line. {conditions(results)}"


def page(results: list[dict[str, Any]]) -> str:
    """All of it as one HTML file. Results of other settings are shown apart."""
    parts = ["<!doctype html><meta charset=utf-8><title>Length generalisation</title>", f"<style>{STYLE}</style>"]
    parts.append("<h1>Length generalisation</h1>")
    for group in by_task(results):
        task = group[0]["task"]
        parts += [f"<h2>{TITLES[task]}</h2><p>{introduction(group)}</p>", task_curves(group), table(task, group)]
    parts.append(
        f"<p>Published: {SOURCE}. Models of other sizes, trained for longer: compare orders, not numbers.</p>"
    )
    return "\n".join(parts)
