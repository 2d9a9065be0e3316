"""Tables of plain text. Only the last column is ever broken, between words: what must be typed stays in one piece."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence

GAP = "  "
NARROW = 24
"""Columns that are left for wrapped text at least: below, the terminal breaks lines as it likes."""


def width() -> int | None:
    """Columns of the terminal; None where there is none, and nothing is broken."""
    found = shutil.get_terminal_size(fallback=(0, 0)).columns
    return found or None


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns below each other; where the terminal is too narrow, the last one goes on below itself."""
    lines = [header, *rows]
    sizes = [max(len(line[i]) for line in lines) for i in range(len(header) - 1)]
    return "\n".join(_line(line, sizes) for line in lines)


def _line(cells: Sequence[str], sizes: Sequence[int]) -> str:
    before = "".join(f"{cell:<{size}}{GAP}" for cell, size in zip(cells, sizes, strict=False))
    return _hung(before, cells[-1])


def _hung(before: str, text: str) -> str:
    columns = width()
    if columns is None or len(before) + len(text) <= columns or columns - len(before) < NARROW:
        return (before + text).rstrip()
    wrapped = textwrap.wrap(text, columns - len(before), break_long_words=False, break_on_hyphens=False)
    return f"\n{' ' * len(before)}".join([before + wrapped[0], *wrapped[1:]]) if wrapped else before.rstrip()


def paragraph(text: str, indent: str = "") -> str:
    """Text broken between words at the terminal's width."""
    return _hung(indent, text)


def fits(columns: int) -> bool:
    """Whether so many columns have room."""
    found = width()
    return found is None or columns <= found
