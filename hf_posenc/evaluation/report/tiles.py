"""Charts of single figures: the heat map of retrieval (`h0` to `h10` for heat) and the short-context tax."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ..measures.rows import Row
from .drawing import FOCUSABLE, Scale, digits, line, mark, svg, text, ticks, with_tooltip
from .views import Grid, figure, length_label, with_error


def heat_map(grid: Grid, named: bool = True) -> str:
    """Accuracy by depth (down) and length (across), with its number and that of its trials in each cell."""
    width, row = 256.0, 34.0
    left, top = 46.0, 22.0
    cell = (width - left) / len(grid.lengths)
    height = top + row * len(grid.depths) + (18 if named else 2)
    parts = [text(0, 14, "depth", "axis-name")] if named else []
    parts += [text(width, height - 2, "length, tokens", "axis-name", "end")] if named else []
    for j, length in enumerate(grid.lengths):
        parts.append(text(left + cell * (j + 0.5), 14, length_label(length), "tick", "middle"))
    for i, depth in enumerate(grid.depths):
        parts.append(text(left - 8, top + row * (i + 0.5) + 4, f"{depth:g} %", "tick", "end"))
        for j, length in enumerate(grid.lengths):
            place = (left + cell * j, top + row * i, cell - 2, row - 2)
            parts.append(_cell(grid, depth, length, place))
    known = [point.value for point in grid.cells.values() if math.isfinite(point.value)]
    mean = f"mean accuracy {figure(sum(known) / len(known), 'accuracy')}" if known else "no finite accuracy"
    desc = f"{len(grid.depths)} depths by {len(grid.lengths)} lengths, {mean}."
    return svg(width, height, f"{grid.task}, {grid.protocol}: {grid.scheme}", desc, "".join(parts), "heat")


def _cell(grid: Grid, depth: float, length: int, place: tuple[float, float, float, float]) -> str:
    x, y, width, height = place
    point = grid.cells.get((depth, length))
    where = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2"'
    if point is None:
        return f'<rect {where} class="void"/>' + text(x + width / 2, y + height / 2 + 4, "–", "tick", "middle")  # noqa: RUF001
    finite = math.isfinite(point.value)
    heat = f"h{round(10 * min(max(point.value, 0.0), 1.0))}" if finite else "void"
    words = text(x + width / 2, y + height / 2 - 1, figure(point.value, "accuracy"), f"cell {heat}", "middle")
    words += text(x + width / 2, y + height - 4, f"n={point.n}", f"cell count {heat}", "middle")
    tip = f"{grid.scheme}, {length_label(length)}, depth {depth:g} %: " + with_error(
        point.value, point.stderr, "accuracy"
    )
    return with_tooltip(
        f'<rect {where} class="{heat}"/>{words}', f"{tip} (n = {point.n})", len(grid.cells) <= FOCUSABLE
    )


def forest(rows: Sequence[Row], styles: Mapping[str, int], *, width: float, cls: str = "") -> str:
    """The short-context tax: a dot and its error for each scheme and length, against zero."""
    spread = [row.value + side * (row.stderr or 0.0) for row in rows for side in (-1, 1) if math.isfinite(row.value)]
    marks = ticks(min([*spread, 0.0]), max([*spread, 0.0]), 4)
    narrow = width < 500  # names above their dots, not beside
    left = 44.0 if narrow else 8.0 * max(len(row.scheme) for row in rows) + 80
    right = width - 116
    across = Scale(marks[0], marks[-1], left + 6, right - 6)
    parts, y = [], 24.0
    for scheme in dict.fromkeys(row.scheme for row in rows):
        parts.append(mark(8, y - 4, styles[scheme]) + text(18, y, scheme, "label"))
        y += 22 if narrow else 0
        for row in (row for row in rows if row.scheme == scheme):
            parts.append(_bar(row, styles, across, y, left, width))
            y += 22
        y += 14
    parts = [*_ground(marks, across, y - 8), *parts]
    parts.append(text(right, y + 25, "loss added to the unpatched model’s, nats", "axis-name", "end"))  # noqa: RUF001
    said = (f"{r.scheme} at {length_label(r.length)}: {with_error(r.value, r.stderr, sign=True)}" for r in rows)
    return svg(width, y + 32, "Short-context tax", "; ".join(said) + ".", "".join(parts), cls)


def _ground(marks: Sequence[float], across: Scale, bottom: float) -> list[str]:
    """Vertical lines, zero the strongest, and their numbers."""
    parts = []
    for value in marks:
        zero = abs(value) < 1e-12
        shown = "0" if zero else f"{value:+.{digits(marks)}f}".replace("-", "−")  # noqa: RUF001
        parts.append(line(across(value), 8, across(value), bottom, "zero" if zero else "grid"))
        parts.append(text(across(value), bottom + 16, shown, "tick", "middle"))
    return parts


def _bar(row: Row, styles: Mapping[str, int], across: Scale, y: float, left: float, right: float) -> str:
    words = with_error(row.value, row.stderr, sign=True)
    tip = f"{row.scheme} at {length_label(row.length)}: {words} (n = {row.n})"
    style = styles[row.scheme]
    inner = text(left - 8, y, length_label(row.length), "tick", "end")
    if math.isfinite(row.value):
        error = row.stderr or 0.0
        ends = across(row.value - error), across(row.value + error)
        inner += f'<g class="s{style % 7}">{line(ends[0], y - 4, ends[1], y - 4, "whisker")}</g>'
        inner += mark(across(row.value), y - 4, style)
    else:
        inner += text(across(0) + 10, y, figure(row.value), "off")
    inner += text(right, y, words, "value", "end")
    reach = f'<rect class="reach" x="{left:.1f}" y="{y - 15:.1f}" width="{across.end - left:.1f}" height="22"/>'
    return with_tooltip(reach + inner, tip, True)
