"""Parts of SVG pictures: scales, lines, words, markers. Colours are the page's, by class (`s0`, `s1`, ...)."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

FOCUSABLE = 60
"""Charts with more points than this have no keyboard navigation; the table has their figures."""


@dataclass(frozen=True)
class Scale:
    """From data to pixels."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (math.log2(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (self.end - self.start) * ((value - low) / (high - low) if high > low else 0.5)


@dataclass(frozen=True, kw_only=True)
class Box:
    """The plot inside its picture."""

    left: float
    right: float
    top: float
    bottom: float


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers that cover a range."""
    rough = (high - low or abs(high) or 1.0) / count
    power: float = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first = math.floor(low / step + 1e-9)
    return [step * i for i in range(first, max(first + 1, math.ceil(high / step - 1e-9)) + 1)]


def digits(marks: Sequence[float]) -> int:
    """Decimals needed to tell neighbouring ticks apart."""
    step = marks[1] - marks[0] if len(marks) > 1 else 1.0
    return next((d for d in range(8) if abs(round(step, d) - step) < 1e-9 * max(1.0, step)), 8)


def svg(width: float, height: float, title: str, desc: str, body: str, cls: str = "") -> str:
    """A picture with a title and a description for screen readers."""
    key = f"c{zlib.crc32((title + body).encode()):08x}"  # the same in every run
    return (
        f'<svg class="chart {cls}" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" '
        f'role="group" aria-labelledby="{key}t {key}d"><title id="{key}t">{escape(title)}</title>'
        f'<desc id="{key}d">{escape(desc)}</desc>{body}</svg>'
    )


def text(x: float, y: float, words: str, cls: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{cls}" text-anchor="{anchor}">{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, cls: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{cls}"/>'


SHAPES = (
    "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0z",
    "M-3.6,-3.6h7.2v7.2h-7.2z",
    "M0,-4.8L4.6,3.6H-4.6z",
    "M0,-5L5,0L0,5L-5,0z",
    "M0,4.8L4.6,-3.6H-4.6z",
    "M-4.2,-1.4h2.8v-2.8h2.8v2.8h2.8v2.8h-2.8v2.8h-2.8v-2.8h-2.8z",
)
"""Markers: colour alone does not tell schemes apart."""


def mark(x: float, y: float, style: int) -> str:
    return (
        f'<path class="mark s{style % 7}" transform="translate({x:.1f},{y:.1f})" d="{SHAPES[style % len(SHAPES)]}"/>'
    )


def with_tooltip(inner: str, words: str, focusable: bool) -> str:
    """A part of a picture with a tooltip, for mouse and keyboard."""
    focus = ' tabindex="0"' if focusable else ""
    return f'<g class="tell" role="img" data-tip="{escape(words)}" aria-label="{escape(words)}"{focus}>{inner}</g>'


def clip_to_plot(box: Box, inner: str) -> str:
    """A part that is clipped to the plot."""
    wide, high = box.right - box.left, box.bottom - box.top
    where = f'x="{box.left:g}" y="{box.top:g}" width="{wide:g}" height="{high:g}"'
    return f'<svg {where} viewBox="{box.left:g} {box.top:g} {wide:g} {high:g}">{inner}</svg>'
