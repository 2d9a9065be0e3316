"""Reports as one file: an HTML page, a PNG picture or Markdown."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...errors import PosencError
from ...extras import require
from ..measures.rows import Row
from .markdown import markdown
from .page import page

SUFFIXES = (".html", ".png", ".md")
PNG = "A report as PNG (.html and .md need nothing more)"


def write(rows: Sequence[Row], path: str | Path, about: Mapping[str, Any]) -> None:
    """Write a report in the format that the name of the file asks for: .html, .png or .md."""
    writers = {".html": write_report, ".htm": write_report, ".png": write_png, ".md": write_markdown}
    suffix = Path(path).suffix.lower()
    if suffix not in writers:
        raise PosencError(f"A report cannot be written as {str(path)!r}: name it with one of {', '.join(SUFFIXES)}.")
    writers[suffix](rows, path, about)


def write_report(rows: Sequence[Row], path: str | Path, about: Mapping[str, Any]) -> None:
    """Write one self-contained HTML file.

    `about` says what was measured: `model`, `text`, `trained_length`, `command` and `title` have places of their own,
    and whatever else it holds, such as `versions`, is listed. `places` has what to say in brackets beside the loss of
    a protocol, scheme and length.
    """
    _write(path, page(_require_rows(rows), about).encode())


def write_markdown(rows: Sequence[Row], path: str | Path, about: Mapping[str, Any]) -> None:
    """Write the tables, and how they were measured, as Markdown."""
    _write(path, markdown(_require_rows(rows), about).encode())


def write_png(rows: Sequence[Row], path: str | Path, about: Mapping[str, Any]) -> None:
    """Write the charts as one picture; needs matplotlib."""
    _require_rows(rows)
    require("matplotlib", "eval", PNG)
    from .picture import picture

    _write(path, picture(rows, about))


def _require_rows(rows: Sequence[Row]) -> Sequence[Row]:
    if not rows:
        raise PosencError("There is nothing to report: no row was measured.")
    return rows


def _write(path: str | Path, content: bytes) -> None:
    """Write atomically, so that no reader gets half a report."""
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise PosencError(f"{path} is a directory; give the file to write.")
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(part, 0o644)  # mkstemp makes files that only their owner can read
        os.replace(part, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(part)
        raise
