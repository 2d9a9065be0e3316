"""Plots as SVG files that stand alone, light or dark as the reader's screen is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hf_posenc.evaluation.report.drawing import Box, Scale, clip_to_plot, digits, line, svg, text, ticks

WIDTH, HEIGHT = 640, 300
BOX = Box(left=64, right=500, top=64, bottom=250)
STYLE = """
text{font:12px system-ui,sans-serif;fill:#444}.title{font-size:14px;font-weight:600;fill:#111}
.grid{stroke:#ddd}.edge{stroke:#888;stroke-dasharray:4 3}.curve{fill:none;stroke-width:2}
.s0{stroke:#888}.s1{stroke:#0b62c4}.s2{stroke:#c2410c}.s3{stroke:#15803d}.s4{stroke:#7e22ce}
.s5{stroke:#b45309}.s6{stroke:#be185d}.t0{fill:#666}.t1{fill:#0b62c4}.t2{fill:#c2410c}.t3{fill:#15803d}
.t4{fill:#7e22ce}.t5{fill:#b45309}.t6{fill:#be185d}.plus{fill:#0b62c4}.minus{fill:#c2410c}.ground{fill:#f6f6f4}
@media(prefers-color-scheme:dark){text{fill:#bbb}.title{fill:#eee}.grid{stroke:#3a3a3a}.edge{stroke:#999}
.s0{stroke:#999}.s1{stroke:#6cb2ff}.s2{stroke:#ff9a66}.s3{stroke:#6fdc8c}.s4{stroke:#cfa4ff}.s5{stroke:#f0c060}
.s6{stroke:#ff8fc0}.t0{fill:#aaa}.t1{fill:#6cb2ff}.t2{fill:#ff9a66}.t3{fill:#6fdc8c}.t4{fill:#cfa4ff}
.t5{fill:#f0c060}.t6{fill:#ff8fc0}.plus{fill:#6cb2ff}.minus{fill:#ff9a66}.ground{fill:#222}}
""".replace("\n", "")


@dataclass(frozen=True)
class Curve:
    name: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True)
class Axis:
    """What a scale shows, in words; its ends are those of the data unless given."""

    label: str
    log: bool = False
    low: float | None = None
    high: float | None = None

    def marks(self, values: Sequence[float]) -> list[float]:
        low = min(values) if self.low is None else self.low
        high = max(values) if self.high is None else self.high
        if not self.log:
            return ticks(low, high)
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        return [10.0**power for power in range(first, max(last, first + 1) + 1)]


def picture_file(title: str, desc: str, body: str, height: float = HEIGHT, width: float = WIDTH) -> str:
    """A picture as a file of its own."""
    head = text(16, 24, title, "title")
    drawn = svg(width, height, title, desc, f"<style>{STYLE}</style>{head}{body}")
    return drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1) + "\n"


def chart(title: str, desc: str, curves: Sequence[Curve], x: Axis, y: Axis, edges: dict[str, float]) -> str:
    """Curves with their names at the right, over a grid; `edges` are dashed lines at values of y."""
    across = x.marks([value for curve in curves for value in curve.x])
    up = y.marks([*(value for curve in curves for value in curve.y), *edges.values()])
    along = Scale(across[0], across[-1], BOX.left, BOX.right, x.log)
    height = Scale(up[0], up[-1], BOX.bottom, BOX.top, y.log)
    parts = [_grid(across, up, along, height), *_labels(x, y)]
    for name, value in edges.items():
        parts += [line(BOX.left, height(value), BOX.right, height(value), "edge")]
        parts += [text(BOX.right + 6, height(value) + 4, name)]
    inside = "".join(_path(curve, along, height, i) for i, curve in enumerate(curves))
    taken = [height(value) + 4 for value in edges.values()]
    for i, curve in enumerate(curves):
        at = _free(min(max(height(curve.y[-1]), BOX.top), BOX.bottom) + 4, taken)
        parts.append(text(BOX.right + 6, at, curve.name, f"t{i % 7}"))
    return picture_file(title, desc, "".join(parts) + clip_to_plot(BOX, inside))


def _free(at: float, taken: list[float]) -> float:
    """The nearest height at which a name does not cover another."""
    steps = (sign * 14 * k for k in range(30) for sign in (-1, 1))
    found = next(at + step for step in steps if all(abs(at + step - other) >= 13 for other in taken))
    taken.append(found)
    return found


def _path(curve: Curve, along: Scale, height: Scale, style: int) -> str:
    points = " ".join(f"{along(x):.1f},{height(y):.1f}" for x, y in zip(curve.x, curve.y, strict=True))
    return f'<polyline class="curve s{style % 7}" points="{points}"/>'


def _grid(across: Sequence[float], up: Sequence[float], along: Scale, height: Scale) -> str:
    parts = [line(BOX.left, height(v), BOX.right, height(v), "grid") for v in up]
    parts += [text(BOX.left - 6, height(v) + 4, _number(v, up), "", "end") for v in up]
    parts += [text(along(v), BOX.bottom + 18, _number(v, across), "", "middle") for v in across]
    return "".join(parts)


def _number(value: float, marks: Sequence[float]) -> str:
    return f"{value:,.{digits(marks)}f}".replace("-0", "0") if value == 0 else f"{value:,.{digits(marks)}f}"


def _labels(x: Axis, y: Axis) -> list[str]:
    return [text((BOX.left + BOX.right) / 2, BOX.bottom + 38, x.label, "", "middle"), text(16, 44, y.label)]


def heat(title: str, desc: str, values: Sequence[Sequence[float]], across: str, down: str) -> str:
    """A map of numbers, blue where they are above 0 and orange below, as strong as they are far from it."""
    rows, columns = len(values), len(values[0])
    size = min(6.0, 520 / columns, 520 / rows)
    most = max(abs(value) for row in values for value in row) or 1.0
    left, top = 46.0, 56.0
    levels: dict[int, list[str]] = {}
    for i, row in enumerate(values):
        for begin, end, level in _runs([round(9 * value / most) for value in row]):
            levels.setdefault(level, []).append(f"M{begin} {i}h{end - begin}v1h{begin - end}z")
    cells = [f'<path class="ground" d="M0 0h{columns}v{rows}h-{columns}z"/>']
    for level, drawn in sorted(levels.items()):
        kind = "plus" if level > 0 else "minus"
        cells.append(f'<path class="{kind}" fill-opacity="{abs(level) / 9:.2f}" d="{"".join(drawn)}"/>')
    parts = [f'<g transform="translate({left:g},{top:g}) scale({size:.3f})">{"".join(cells)}</g>']
    parts += [text(left, 48, f"{across}, 0 to {columns - 1} →"), text(16, top + rows * size + 18, f"↓ {down}")]
    return picture_file(title, desc, "".join(parts), top + rows * size + 30)


def _runs(levels: Sequence[int]) -> list[tuple[int, int, int]]:
    """Neighbours of one level as (begin, end, level); those at 0 are left out."""
    found: list[tuple[int, int, int]] = []
    for i, level in enumerate(levels):
        if found and found[-1][1] == i and found[-1][2] == level:
            found[-1] = (found[-1][0], i + 1, level)
        elif level:
            found.append((i, i + 1, level))
    return found
