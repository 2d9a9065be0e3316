"""Tables of plain text. Only the last column is wrapped, so that names and commands can be copied."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence

GAP = "  "
NARROW = 24
"""The least width to wrap text to; if there is less room, lines are left to the terminal."""


def width() -> int | None:
    """Columns of the terminal; None if the output is no terminal, where nothing is wrapped."""
    found = shutil.get_terminal_size(fallback=(0, 0)).columns
    return found or None


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An aligned table; if the terminal is too narrow, the last column is wrapped."""
    lines = [header, *rows]
    sizes = [max(len(line[i]) for line in lines) for i in range(len(header) - 1)]
    return "\n".join(_line(line, sizes) for line in lines)


def _line(cells: Sequence[str], sizes: Sequence[int]) -> str:
    before = "".join(f"{cell:<{size}}{GAP}" for cell, size in zip(cells, sizes, strict=False))
    return _with_hanging_indent(before, cells[-1])


def _with_hanging_indent(before: str, text: str) -> str:
    columns = width()
    if columns is None or len(before) + len(text) <= columns or columns - len(before) < NARROW:
        return (before + text).rstrip()
    wrapped = textwrap.wrap(text, columns - len(before), break_long_words=False, break_on_hyphens=False)
    return f"\n{' ' * len(before)}".join([before + wrapped[0], *wrapped[1:]]) if wrapped else before.rstrip()


def paragraph(text: str, indent: str = "") -> str:
    """Text wrapped to the width of the terminal."""
    return _with_hanging_indent(indent, text)


def fits(columns: int) -> bool:
    """Whether the terminal is at least so wide."""
    found = width()
    return found is None or columns <= found
