"""The page of a search: its progress, the result beside published maps, and losses on held-out text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from string import Template

from ..evaluation.report.drawing import Box, Scale, digits, line, mark, svg, text, ticks, with_tooltip
from .search import READ, Found

WIDE, HIGH = 640, 300
BOX = Box(left=56, right=WIDE - 16, top=16, bottom=HIGH - 40)


def page(found: Found, command: str) -> str:
    """The whole page as HTML, which needs no network."""
    template = Template(resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    return template.substitute(
        sentence=escape(found.sentence),
        course=_course(found),
        factors=_factors(found) if found.known else "",
        table=_table(found),
        command=escape(command),
        options=escape(", ".join(f"{k}={v}" for k, v in found.scheme.options().items())),
    )


def _course(found: Found) -> str:
    points = [(float(r.read), r.best) for r in found.rounds if math.isfinite(r.best)]
    return _chart(
        "How the search went",
        "The lowest loss so far, against how many samples were read.",
        {"best so far": points},
        ("samples read", "loss of the samples that guide"),
    )


def _factors(found: Found) -> str:
    """A chart of factors, if the search was over them. The first gene is the attention factor."""
    curves = {"searched": [(float(i), f) for i, f in enumerate(found.genes[1:])]}
    return _chart(
        "How much each pair of channels is slowed",
        "From the fastest pair on the left to the slowest on the right.",
        {**curves, **{n: [(float(i), f) for i, f in enumerate(g[1:])] for n, g in found.known.items()}},
        ("pair", "factor"),
    )


def _chart(title: str, desc: str, curves: Mapping[str, Sequence[tuple[float, float]]], axes: tuple[str, str]) -> str:
    xs, ys = ([p[i] for points in curves.values() for p in points] for i in (0, 1))
    low, high = min(ys), max(ys)
    margin = 0.06 * (high - low) or 0.5
    across = Scale(min(xs), max(xs), BOX.left, BOX.right)
    up = Scale(low - margin, high + margin, BOX.bottom, BOX.top)
    marks = [tick for tick in ticks(low, high) if low - margin <= tick <= high + margin]
    places = digits(marks)
    body = "".join(
        line(BOX.left, up(tick), BOX.right, up(tick), "grid")
        + text(BOX.left - 6, up(tick) + 4, f"{tick:.{places}f}", "tick", "end")
        for tick in marks
    )
    for style, (name, points) in enumerate(curves.items()):
        path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in points)
        drawn = f'<polyline class="curve" points="{path}"/>'
        drawn += "".join(
            with_tooltip(mark(across(x), up(y), style), f"{name}: {axes[0]} {x:g}, {y:.4g}", style == 0)
            for x, y in points
        )
        body += f'<g class="s{style % 7}">{drawn}</g>'
    body += text((BOX.left + BOX.right) / 2, HIGH - 8, axes[0], "tick", "middle")
    names = "".join(
        f'<li class="s{style % 7}"><svg width="14" height="14" viewBox="-7 -7 14 14">{mark(0, 0, style)}</svg> '
        f"{escape(name)}</li>"
        for style, name in enumerate(curves)
    )
    legend = f'<ul class="legend">{names}</ul>' if len(curves) > 1 else ""
    picture = svg(WIDE, HIGH, title, axes[1], body)
    return f"<section><h2>{escape(title)}</h2><p>{escape(desc)}</p>{legend}{picture}</section>"


def task_title(task: str) -> str:
    """The title of a column of losses."""
    return "loss" if task == READ else "loss of needles' answers"


def _table(found: Found) -> str:
    columns = list(dict.fromkeys((row.task, row.length) for row in found.rows))
    names = list(dict.fromkeys(row.scheme for row in found.rows))
    heads = "".join(f"<th>{task_title(task)} at {length}</th>" for task, length in columns)
    lines = []
    for name in names:
        cells = []
        for task, length in columns:
            row = found.value(name, length, task)
            bars = "" if row.stderr is None else f" ± {row.stderr:.3f}"
            cells.append(f"<td>{row.value:.4f}{bars}</td>")
        lines.append(f"<tr><th>{escape(name)}</th>{''.join(cells)}</tr>")
    n = found.rows[-1].n
    return (
        f"<section><h2>On text that the search never saw</h2><p>Mean over {n} windows with its standard error; the "
        f"same windows for every row.</p><table><thead><tr><th>map</th>{heads}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></section>"
    )
