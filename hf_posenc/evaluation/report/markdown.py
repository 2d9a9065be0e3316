"""The report as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..measures.rows import Row
from .explanations import ERRORS, task_title
from .provenance import about_items, task_entries
from .views import (
    Grid,
    Panel,
    figure,
    grids,
    length_label,
    loss_panels,
    plain_details,
    position_panels,
    score_panels,
    shift_panels,
    tax_rows,
    with_error,
)


def markdown(rows: Sequence[Row], about: Mapping[str, Any]) -> str:
    """Tables of all charts of the page, every figure, and how each was measured."""
    parts = [f"# {cell(about.get('title', 'How far does it read?'))}"]
    parts += [cell(about["verdict"])] if about.get("verdict") else []
    parts += [f"## Loss against length: {cell(_panel_name(panel))}\n\n{_panel(panel)}" for panel in loss_panels(rows)]
    parts += [f"## Loss by position, {cell(panel.note)}\n\n{_panel(panel)}" for panel in position_panels(rows)]
    parts += [f"## Shift\n\n{_panel(panel)}" for panel in shift_panels(rows)]
    parts += [f"## {cell(_grid_name(grid))}\n\n{_grid(grid)}" for grid in grids(rows)]
    parts += [f"## {cell(task_title(p.task))}, {cell(p.protocol)}\n\n{_panel(p)}" for p in score_panels(rows)]
    tax = tax_rows(rows)
    if tax:
        lines = [(r.scheme, length_label(r.length), with_error(r.value, r.stderr, sign=True), str(r.n)) for r in tax]
        parts.append("## Short-context tax\n\n" + table(("scheme", "length", "loss added, nats", "n"), lines))
    parts.append("## Every figure\n\n" + _all(rows))
    told = [f"- **{cell(entry.name)}**: {cell(entry.words)} ({cell(entry.counts)})" for entry in task_entries(rows)]
    parts.append("## How each number was made\n\n" + "\n".join([*told, f"- **errors**: {ERRORS}"]))
    if about.get("command"):
        fence = "`" * 3 if "```" not in str(about["command"]) else "~" * 3
        parts.append(f"{fence}\n{about['command']}\n{fence}")
    items = [f"- {cell(name)}: {cell(value)}" for name, value in about_items(about)]
    return "\n\n".join([*parts, *(["\n".join(items)] if items else [])]) + "\n"


def cell(value: object) -> str:
    """Text escaped so that it cannot end a cell or line, or begin a tag."""
    text = " ".join(str(value).split())
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(map(cell, row)) + " |" for row in rows)


def _panel_name(panel: Panel) -> str:
    return ", ".join(filter(None, (panel.metric, panel.protocol, panel.note)))


def _grid_name(grid: Grid) -> str:
    return f"{task_title(grid.task)} by depth, {grid.protocol}: {grid.scheme}"


def _panel(panel: Panel) -> str:
    places = sorted({point.x for point in panel.points})
    lines = []
    for curve in panel.curves:
        at = {point.x: with_error(point.value, point.stderr, panel.metric) for point in curve.points}
        lines.append([curve.scheme, *(at.get(place, "-") for place in places)])
    return table(["scheme", *map(length_label, places)], lines)


def _grid(grid: Grid) -> str:
    lines = []
    for depth in grid.depths:
        found = (grid.cells.get((depth, length)) for length in grid.lengths)
        lines.append(
            [
                f"{depth:g} %",
                *("-" if point is None else f"{figure(point.value, 'accuracy')} ({point.n})" for point in found),
            ]
        )
    return table(["depth", *map(length_label, grid.lengths)], lines)


def _all(rows: Sequence[Row]) -> str:
    head = ("task", "protocol", "scheme", "length", "metric", "value", "s.e.", "n", "made from")
    lines = []
    for row in rows:
        error = "" if row.stderr is None else figure(row.stderr, row.metric)
        how = "; ".join(f"{key} {value}" for key, value in plain_details(row).items())
        value = figure(row.value, row.metric)
        lines.append((row.task, row.protocol, row.scheme, str(row.length), row.metric, value, error, str(row.n), how))
    return table(head, lines)
