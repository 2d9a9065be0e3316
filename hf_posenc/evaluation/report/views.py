"""The data of a report: curves, grids and bars, before they are drawn in any format."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..measures.rows import Row

UNPATCHED = "unpatched"
LOSSES = ("loss", "perplexity")


@dataclass(frozen=True, kw_only=True)
class Point:
    x: float
    value: float
    stderr: float | None
    n: int


@dataclass(frozen=True, kw_only=True)
class Curve:
    scheme: str
    points: tuple[Point, ...]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Curves of one chart: the same task, protocol and metric, one curve for each scheme."""

    task: str
    protocol: str
    metric: str
    note: str
    """What else distinguishes this panel, such as a stride or the length of the window."""
    curves: tuple[Curve, ...]

    @property
    def points(self) -> list[Point]:
        return [point for curve in self.curves for point in curve.points]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Accuracy by depth and length, of one scheme."""

    task: str
    protocol: str
    scheme: str
    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    """Depths in percent of the text."""
    cells: dict[tuple[float, int], Point]
    chance: str
    """The accuracy of guessing, if known."""


def scheme_order(rows: Sequence[Row]) -> list[str]:
    """The unpatched model first, then in order of rows."""
    return sorted(dict.fromkeys(row.scheme for row in rows), key=lambda scheme: scheme != UNPATCHED)


def loss_panels(rows: Sequence[Row]) -> list[Panel]:
    """Loss against length, a panel for each protocol (and stride); perplexity where no loss was kept."""
    losses = [row for row in rows if row.task == "perplexity" and row.metric in LOSSES]
    kept = {(row.protocol, row.scheme, row.length) for row in losses if row.metric == "loss"}
    shown = [row for row in losses if row.metric == "loss" or (row.protocol, row.scheme, row.length) not in kept]
    return _panels(shown, lambda row: float(row.length), lambda row: _detail_words(row, "stride"))


def position_panels(rows: Sequence[Row]) -> list[Panel]:
    """Loss against the position in the window, a panel for each length of window."""
    shown = [row for row in rows if row.task == "loss_by_position"]
    return _panels(shown, position_of, lambda row: f"windows of {length_label(row.details.get('window', 0))}")


def shift_panels(rows: Sequence[Row]) -> list[Panel]:
    """The loss of the same passages at growing positions."""
    shown = [row for row in rows if row.task == "shift" and row.metric == "loss"]
    return _panels(shown, lambda row: float(row.length), lambda row: "")


def score_panels(rows: Sequence[Row]) -> list[Panel]:
    """Scores against length that have no depths to lay out: a harness, first sentences."""
    deep = _deep(rows)
    shown = [row for row in rows if _is_score(row) and (row.task, row.protocol) not in deep]
    return _panels(shown, lambda row: float(row.length), lambda row: "")


def tax_rows(rows: Sequence[Row]) -> list[Row]:
    """Loss that a scheme costs at lengths the model was trained for, as differences from the unpatched model."""
    order = scheme_order(rows)
    return sorted((row for row in rows if row.task == "tax"), key=lambda row: (order.index(row.scheme), row.length))


def grids(rows: Sequence[Row]) -> list[Grid]:
    """Depth x length, for each task, protocol and scheme that has depths."""
    deep = _deep(rows)
    shown = [row for row in rows if (row.task, row.protocol) in deep and depth_of(row) is not None]
    scale = 100.0 if all(depth_of(row) <= 1 for row in shown) else 1.0  # type: ignore[operator]
    found = []
    for (task, protocol), group in _group_by(shown, lambda row: (row.task, row.protocol)).items():
        lengths = tuple(sorted({row.length for row in group}))
        depths = tuple(sorted({scale * float(depth_of(row)) for row in group}))  # type: ignore[arg-type]
        for scheme in scheme_order(group):
            own = _group_by(
                [row for row in group if row.scheme == scheme],
                lambda row: (scale * float(depth_of(row)), row.length),  # type: ignore[arg-type]
            )
            cells = {place: _pool(place[1], same) for place, same in own.items()}
            chance = [row.details["chance"] for row in group if row.details.get("chance")]
            found.append(
                Grid(task=task, protocol=protocol, scheme=scheme, lengths=lengths, depths=depths, cells=cells,
                     chance=span([round(value, 2) for value in chance]) if chance else "")
            )  # fmt: skip
    return found


def depth_of(row: Row) -> float | None:
    """The depth of the needle, 0 to 1 or in percent; None if a row has no single depth."""
    depth = row.details.get("depth")
    return float(depth) if isinstance(depth, int | float) else None


def position_of(row: Row) -> float:
    """The middle of the positions of a row of `loss_by_position`."""
    ends = row.details.get("from", row.length), row.details.get("to", row.length)
    return (float(ends[0]) + float(ends[1])) / 2


def length_label(length: float) -> str:
    """4096 as 4k."""
    return f"{length / 1024:g}k" if length >= 1024 and length % 512 == 0 else f"{length:g}"


def figure(value: float, metric: str = "loss", sign: bool = False) -> str:
    """A formatted number: NaN and infinity by name, scores with two digits, losses with three."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"  # noqa: RUF001  a true minus
    digits = 3 if metric == "loss" else 2
    text = f"{value:{'+' if sign else ''},.{digits}f}" if abs(value) < 1e5 else f"{value:.3g}"
    text = text if text.strip("+-0.,") else text.lstrip("+-")  # a zero has no side
    return text.replace("-", "−")  # noqa: RUF001


def with_error(value: float, stderr: float | None, metric: str = "loss", sign: bool = False) -> str:
    shown = figure(value, metric, sign)
    return shown if stderr is None or not math.isfinite(stderr) else f"{shown} ± {figure(stderr, metric)}"


def plain_details(row: Row) -> dict[str, str]:
    """The details that fit into a cell, without answers and prompts."""
    shown = {}
    for key, value in row.details.items():
        if key == "how" or value is False:  # explained elsewhere, or not true
            continue
        if isinstance(value, dict) and value and all(isinstance(v, int | float) for v in value.values()):
            shown[key] = ", ".join(f"{name} {number:g}" for name, number in value.items())
        elif isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) <= 60):
            shown[key] = f"{value:g}" if isinstance(value, float) else str(value)
        elif key != "losses" and isinstance(value, list) and value and all(isinstance(v, int | float) for v in value):
            shown[key] = span(value)
    return shown


def span(values: Sequence[float]) -> str:
    """One number, or a range."""
    low, high = min(values), max(values)
    return f"{low:,.10g}" if low == high else f"{low:,.10g} to {high:,.10g}"


def _is_score(row: Row) -> bool:
    return row.metric not in LOSSES and row.task not in ("tax", "loss_by_position", "shift")


def _deep(rows: Sequence[Row]) -> set[tuple[str, str]]:
    """Tasks and protocols that were run at several depths."""
    groups = _group_by([row for row in rows if _is_score(row)], lambda row: (row.task, row.protocol))
    return {key for key, group in groups.items() if len({depth_of(row) for row in group} - {None}) > 1}


def _detail_words(row: Row, key: str) -> str:
    return f"{key} {row.details[key]}" if row.details.get(key) is not None else ""


def _group_by(rows: Sequence[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _panels(rows: Sequence[Row], x: Callable[[Row], float], note: Callable[[Row], str]) -> list[Panel]:
    order = scheme_order(rows)
    found = []
    for key, group in _group_by(rows, lambda row: (row.task, row.protocol, row.metric, note(row))).items():
        curves = []
        for scheme, own in sorted(_group_by(group, lambda row: row.scheme).items(), key=lambda p: order.index(p[0])):
            points = (Point(x=x(row), value=row.value, stderr=row.stderr, n=row.n) for row in own)
            curves.append(Curve(scheme=scheme, points=tuple(sorted(points, key=lambda point: point.x))))
        found.append(Panel(task=key[0], protocol=key[1], metric=key[2], note=key[3], curves=tuple(curves)))
    return found


def _pool(length: int, rows: Sequence[Row]) -> Point:
    """Pool rows of the same cell with different seeds, weighted by their trials."""
    if len(rows) == 1:
        return Point(x=length, value=rows[0].value, stderr=rows[0].stderr, n=rows[0].n)
    n = sum(row.n for row in rows)
    return Point(x=length, value=sum(row.value * row.n for row in rows) / n, stderr=None, n=n)
