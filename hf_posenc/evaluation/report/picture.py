"""The report's charts as one PNG."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..measures.rows import Row
from .curves import domain, off_scale
from .explanations import task_title
from .views import (
    Grid,
    Panel,
    figure,
    grids,
    length_label,
    loss_panels,
    position_panels,
    scheme_order,
    score_panels,
    shift_panels,
    tax_rows,
)

COLOURS = ("#3f4448", "#0072b2", "#c65200", "#00845f", "#a8528a", "#9a6a00", "#2a86b8")
MARKERS = "osD^vP"
COLUMNS = 3


def picture(rows: Sequence[Row], about: Mapping[str, Any]) -> bytes:
    """All charts on a grid, as PNG."""
    order = scheme_order(rows)
    styles = {scheme: i for i, scheme in enumerate(order if order[0] == "unpatched" else ["", *order])}
    drawn: list[Callable[[Axes], None]] = [
        partial(_curves, panel=panel, styles=styles, trained=about.get("trained_length"))
        for panel in (*loss_panels(rows), *position_panels(rows), *shift_panels(rows), *score_panels(rows))
    ]
    drawn += [partial(_heat, grid=grid) for grid in grids(rows)]
    if tax := tax_rows(rows):
        drawn.append(partial(_tax, rows=tax, styles=styles))
    columns = min(COLUMNS, max(1, len(drawn)))
    lines = max(1, math.ceil(len(drawn) / columns))
    sheet = Figure(figsize=(5.2 * columns, 3.9 * lines + 0.6), layout="constrained", dpi=140)
    places = sheet.subplots(lines, columns, squeeze=False).flatten()
    for axes, draw in zip(places, drawn, strict=False):
        draw(axes)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in places[len(drawn) :]:
        axes.set_axis_off()
    named = ": ".join(str(about[key]) for key in ("title", "model") if about.get(key))
    sheet.suptitle(named or "How far does it read?", parse_math=False)
    content = io.BytesIO()
    sheet.savefig(content, format="png")
    return content.getvalue()


def _curves(axes: Axes, panel: Panel, styles: Mapping[str, int], trained: int | None) -> None:
    low, high = domain(panel)
    few = len(panel.points) <= 60
    for curve in panel.curves:
        style = styles[curve.scheme]
        colour, marker = COLOURS[style % len(COLOURS)], MARKERS[style % len(MARKERS)]
        x = [point.x for point in curve.points]
        y = [point.value for point in curve.points]
        error = [point.stderr or 0.0 for point in curve.points]
        axes.plot(x, y, color=colour, marker=marker if few else "", markersize=5, label=curve.scheme)
        below = [v - e for v, e in zip(y, error, strict=True)]
        above = [v + e for v, e in zip(y, error, strict=True)]
        axes.fill_between(x, below, above, color=colour, alpha=0.15, linewidth=0)
    lost: dict[float, list[str]] = {}
    for _, point in off_scale(panel, high, every=few):
        arrow = "" if math.isnan(point.value) else "↑"
        lost.setdefault(point.x, []).append(arrow + figure(point.value, panel.metric))
    for place, words in lost.items():
        axes.annotate("\n".join(words), (place, high), fontsize=7, ha="center", va="bottom")
    axes.set_ylim(low, high)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: length_label(value))
    axes.xaxis.set_minor_formatter(lambda *_: "")
    if trained is not None:
        axes.axvline(trained, color="#585d62", linestyle=":", linewidth=1)
    title = ", ".join(filter(None, (task_title(panel.task), panel.protocol, panel.note)))
    axes.set_title(title, fontsize=10, loc="left", pad=14, parse_math=False)
    axes.set_ylabel("loss, nats per token" if panel.metric == "loss" else panel.metric, fontsize=8)
    axes.legend(fontsize=7, frameon=False)


def _heat(axes: Axes, grid: Grid) -> None:
    values = [
        [grid.cells[depth, length].value if (depth, length) in grid.cells else math.nan for length in grid.lengths]
        for depth in grid.depths
    ]
    axes.imshow(values, vmin=0, vmax=1, cmap="Blues", aspect="auto")
    for i, line in enumerate(values):
        for j, value in enumerate(line):
            known = (grid.depths[i], grid.lengths[j]) in grid.cells
            count = grid.cells[grid.depths[i], grid.lengths[j]].n if known else 0
            words = f"{figure(value, 'accuracy')}\nn={count}" if known else "–"  # noqa: RUF001
            axes.text(j, i, words, ha="center", va="center", fontsize=7, color="white" if value > 0.55 else "black")
    axes.set_xticks(range(len(grid.lengths)), [length_label(length) for length in grid.lengths])
    axes.set_yticks(range(len(grid.depths)), [f"{depth:g} %" for depth in grid.depths])
    axes.set_ylabel("depth", fontsize=8)
    axes.set_title(
        f"{task_title(grid.task)}, {grid.protocol}: {grid.scheme}", fontsize=10, loc="left", parse_math=False
    )


def _tax(axes: Axes, rows: Sequence[Row], styles: Mapping[str, int]) -> None:
    places = range(len(rows) - 1, -1, -1)
    for place, row in zip(places, rows, strict=True):
        colour = COLOURS[styles[row.scheme] % len(COLOURS)]
        if math.isfinite(row.value):
            axes.errorbar(row.value, place, xerr=row.stderr, fmt="o", color=colour, markersize=5)
        else:
            axes.text(0, place, figure(row.value), color=colour, fontsize=8, va="center")
    axes.axvline(0, color="#585d62", linewidth=1)
    axes.set_yticks(list(places), [f"{row.scheme}, {length_label(row.length)}" for row in rows], fontsize=8)
    axes.set_title("short-context tax: loss added, nats", fontsize=10, loc="left")
