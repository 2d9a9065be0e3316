"""Curves against length or position, with bands of error."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .drawing import FOCUSABLE, Box, Scale, clip_to_plot, digits, line, mark, svg, text, ticks, with_tooltip
from .views import Curve, Panel, Point, figure, length_label, with_error

EXPLODED = 1.5
"""Nats above the lowest loss from which points are off the scale: a perplexity 4.5 times as high."""
STACKED = 28
"""Pixels of a label for a point off the scale."""
BANDS = 3
"""With more curves than this, errors are drawn as bars: bands would cover each other."""
LEVELS = 6
"""If more labels than this are stacked, each curve labels only its worst point."""


def domain(panel: Panel) -> tuple[float, float]:
    """The range of the vertical axis: 0 to 1 for scores; for losses, without those that exploded."""
    finite = [point for point in panel.points if math.isfinite(point.value)]
    if panel.metric not in ("loss", "perplexity"):
        return 0.0, max([1.0, *(point.value for point in finite)])
    if not finite:
        return 0.0, 1.0
    lowest = min(point.value for point in finite)
    reach = EXPLODED * (2 if panel.task == "loss_by_position" else 1)  # the first tokens are hard for any model
    reach = reach if panel.metric == "loss" else (math.exp(reach) - 1) * lowest
    sane = [point for point in finite if point.value <= lowest + reach]
    low = min(point.value - _error(point) for point in sane)
    high = max(point.value + min(_error(point), reach) for point in sane)
    margin = 0.06 * (high - low) or 0.5
    return low - margin, high + margin


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A panel with everything needed to draw it."""

    panel: Panel
    styles: Mapping[str, int]
    box: Box
    across: Scale
    up: Scale
    lost: Sequence[tuple[int, str, Point]]
    """Points off the scale, and the level of their labels."""
    marked: bool
    """Whether every point has a marker."""

    @property
    def focusable(self) -> bool:
        return len(self.panel.points) <= FOCUSABLE

    def tip(self, scheme: str, point: Point) -> str:
        shown = with_error(point.value, point.stderr, self.panel.metric)
        return f"{scheme} at {length_label(point.x)}: {shown} (n = {point.n})"


def line_chart(
    panel: Panel,
    styles: Mapping[str, int],
    *,
    size: tuple[float, float],
    labels: bool,
    x_name: str,
    trained: int | None = None,
    marked: bool = True,
    cls: str = "",
) -> str:
    """Curves with bands of one standard error. Points off the scale are labelled in a strip above."""
    frame = make_frame(panel, styles, size, labels, marked)
    parts = [text(0, 12, "loss, nats per token" if panel.metric == "loss" else panel.metric, "axis-name")]
    parts += _axes(frame) + _trained_length_line(frame, trained, x_name)
    for curve in panel.curves:
        drawn = "".join(_band(frame, run) + _line(frame, run) for run in _runs(curve))
        parts.append(f'<g class="s{styles[curve.scheme] % 7}">{clip_to_plot(frame.box, drawn)}</g>')
    for curve in panel.curves:
        parts += _points(frame, curve)
    parts += _off_scale_marks(frame) + (_labels(frame) if labels else [])
    height = frame.box.bottom + 42
    return svg(size[0], height, _title(panel), _summary(panel), "".join(parts), cls)


def make_frame(
    panel: Panel, styles: Mapping[str, int], size: tuple[float, float], labels: bool, marked: bool
) -> Frame:
    """The layout: room on the right for names, and above for points off the scale."""
    low, high = domain(panel)
    room = 8 * max(len(shorten(curve.scheme)) for curve in panel.curves) + 26 if labels else 14
    places = [point.x for point in panel.points]
    across = Scale(min(places), max(places), 60, size[0] - room - 14, log=min(places) > 0)
    lost = stack_labels(off_scale(panel, high, every=marked), across)
    if len({level for level, _, _ in lost}) > LEVELS:
        lost = stack_labels(off_scale(panel, high, every=False), across)
    strip = STACKED * len({level for level, _, _ in lost})
    box = Box(left=46, right=size[0] - room, top=26 + strip, bottom=size[1] - 42 + strip)
    up = Scale(low, high, box.bottom, box.top)
    return Frame(panel=panel, styles=styles, box=box, across=across, up=up, lost=lost, marked=marked)


def shorten(name: str) -> str:
    """A name shortened to fit beside a chart; tables have the whole name."""
    return name if len(name) <= 24 else name[:23] + "…"


def stack_labels(lost: Sequence[tuple[str, Point]], across: Scale) -> list[tuple[int, str, Point]]:
    """Put each label on the lowest level where it covers no other."""
    ends: list[float] = []
    found = []
    for scheme, point in sorted(lost, key=lambda pair: pair[1].x):
        x = across(point.x)
        level = next((i for i, end in enumerate(ends) if x - end >= 50), len(ends))
        ends[level : level + 1] = [x]
        found.append((level, scheme, point))
    return found


def off_scale(panel: Panel, high: float, every: bool = True) -> list[tuple[str, Point]]:
    """Points that are not finite or above the axis, with their schemes; or only the worst of each curve."""
    found = []
    for curve in panel.curves:
        lost = [point for point in curve.points if not point.value <= high or math.isinf(point.value)]
        if lost and not every:
            lost = [max(lost, key=lambda point: math.inf if math.isnan(point.value) else point.value)]
        found += [(curve.scheme, point) for point in lost]
    return found


def _error(point: Point) -> float:
    return point.stderr if point.stderr is not None and math.isfinite(point.stderr) else 0.0


def _title(panel: Panel) -> str:
    return ", ".join(filter(None, (f"{panel.metric} of {panel.task}", panel.protocol, panel.note)))


def _summary(panel: Panel) -> str:
    def words_of(curve: Curve) -> str:
        ends = [curve.points[0], curve.points[-1]]
        return f"{curve.scheme} " + " to ".join(
            f"{figure(p.value, panel.metric)} at {length_label(p.x)}" for p in ends
        )

    return "; ".join(map(words_of, panel.curves)) + "."


def _powers(positions: Sequence[float]) -> list[float]:
    low, high = max(positions[0], 1.0), positions[-1]
    powers = [2.0**i for i in range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)]
    return powers[:: math.ceil(len(powers) / 7)] if powers else [high]


def _axes(frame: Frame) -> list[str]:
    box, parts = frame.box, []
    marks = ticks(frame.up.low, frame.up.high)
    for value in marks:
        if frame.up.low - 1e-9 <= value <= frame.up.high + 1e-9:
            y = frame.up(value)
            parts.append(line(box.left, y, box.right, y, "grid"))
            parts.append(text(box.left - 8, y + 4, f"{value:.{digits(marks)}f}", "tick", "end"))
    places = sorted({point.x for point in frame.panel.points})
    last = -math.inf
    for place in places if frame.marked else _powers(places):
        x = frame.across(place)
        if x - last >= 30:  # labels must not run into each other
            parts.append(line(x, box.bottom, x, box.bottom + 4, "rule"))
            parts.append(text(x, box.bottom + 18, length_label(place), "tick", "middle"))
            last = x
    return [*parts, line(box.left, box.bottom, box.right, box.bottom, "rule")]


def _trained_length_line(frame: Frame, trained: int | None, x_name: str) -> list[str]:
    """The name of the axis, and a line at the trained length, labelled below the axis."""
    box, across = frame.box, frame.across
    name = {"end": (box.right - 6.3 * len(x_name), box.right), "start": (box.left, box.left + 6.3 * len(x_name))}
    if trained is None or not across.low <= trained <= across.high:
        return [text(box.right, box.bottom + 36, x_name, "axis-name", "end")]
    x = across(trained)
    label = {"start": (x - 4, x + 82), "end": (x - 82, x + 4)}
    pairs = itertools.product(("start", "end"), ("end", "start"))
    free = (
        (one, other)
        for one, other in pairs
        if label[one][1] <= box.right + 14 and (label[one][1] < name[other][0] or name[other][1] < label[one][0])
    )
    one, other = next(free, ("start", "end"))
    return [
        line(x, box.top, x, box.bottom, "trained"),
        text(label[one][one == "end"], box.bottom + 36, "trained length", "note", one),
        text(name[other][other == "end"], box.bottom + 36, x_name, "axis-name", other),
    ]


def _runs(curve: Curve) -> list[list[Point]]:
    """Runs of finite points: a line is broken where a value is not finite."""
    runs = itertools.groupby(curve.points, key=lambda point: math.isfinite(point.value))
    return [list(run) for finite, run in runs if finite]


def _band(frame: Frame, run: Sequence[Point]) -> str:
    if not any(map(_error, run)):
        return ""
    if frame.marked and len(frame.panel.curves) > BANDS:
        ends = ((frame.across(p.x), frame.up(p.value - _error(p)), frame.up(p.value + _error(p))) for p in run)
        return "".join(line(x, low, x, high, "whisker") for x, low, high in ends)
    if len(run) < 2:
        return ""
    upper = [f"{frame.across(p.x):.1f},{frame.up(p.value + _error(p)):.1f}" for p in run]
    lower = [f"{frame.across(p.x):.1f},{frame.up(p.value - _error(p)):.1f}" for p in reversed(run)]
    return f'<polygon class="band" points="{" ".join(upper + lower)}"/>'


def _line(frame: Frame, run: Sequence[Point]) -> str:
    points = " ".join(f"{frame.across(p.x):.1f},{frame.up(p.value):.1f}" for p in run)
    return f'<polyline class="curve" points="{points}"/>'


def _points(frame: Frame, curve: Curve) -> list[str]:
    parts = []
    for point in curve.points:
        if math.isfinite(point.value) and point.value <= frame.up.high:
            x, y = frame.across(point.x), frame.up(point.value)
            inner = f'<circle class="reach" cx="{x:.1f}" cy="{y:.1f}" r="{10 if frame.marked else 5}"/>'
            inner += mark(x, y, frame.styles[curve.scheme]) if frame.marked else ""
            parts.append(with_tooltip(inner, frame.tip(curve.scheme, point), frame.focusable))
    return parts


def _off_scale_marks(frame: Frame) -> list[str]:
    """A marker and a number for each point off the scale, stacked above the chart."""
    box = frame.box
    parts = [line(box.left, box.top, box.right, box.top, "torn")] if frame.lost else []
    for level, scheme, point in frame.lost:
        x, y = frame.across(point.x), box.top - 11 - STACKED * level
        arrow = "" if math.isnan(point.value) else "↑"
        inner = mark(x, y, frame.styles[scheme])
        inner += text(x, y - 9, arrow + figure(point.value, frame.panel.metric), "off", "middle")
        parts.append(with_tooltip(inner, frame.tip(scheme, point) + ", off the scale", frame.focusable))
    return parts


def _labels(frame: Frame) -> list[str]:
    """Names beside the ends of their curves, moved apart so that they do not overlap."""
    box, wanted = frame.box, []
    for curve in frame.panel.curves:
        finite = [point.value for point in curve.points if math.isfinite(point.value)]
        y = frame.up(finite[-1]) if finite else box.top
        wanted.append((min(max(y, box.top + 4), box.bottom), curve.scheme))
    wanted.sort()
    parts = []
    for (_, scheme), y in zip(wanted, apart([y for y, _ in wanted], 16, box.bottom), strict=True):
        parts.append(
            mark(box.right + 10, y, frame.styles[scheme]) + text(box.right + 20, y + 4, shorten(scheme), "label")
        )
    return parts


def apart(places: Sequence[float], gap: float, bottom: float) -> list[float]:
    """Ascending places moved as little as possible to be a gap apart: first down, then up from the bottom."""
    moved: list[float] = []
    for place in places:
        moved.append(max(place, moved[-1] + gap) if moved else place)
    limit = bottom
    for i in range(len(moved) - 1, -1, -1):
        moved[i] = min(moved[i], limit)
        limit = moved[i] - gap
    return moved
