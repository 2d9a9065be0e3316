"""Files of results: checked before a run, so that hours of work are not lost, and written after it."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...errors import PosencError
from ...extras import missing_package
from ..measures.rows import Row
from ..report import PNG, SUFFIXES
from ..report import write as write_report


def refuse_outputs(json_file: str | None, report: str | None, out: str | None) -> None:
    """Raise for files that cannot be written."""
    if report is not None:
        refuse_report(report)
    for option, path in (("--json", json_file), ("--report", report), ("--out", out)):
        if path is not None:
            refuse_unwritable(option, Path(os.path.realpath(path)), replaced=option == "--report")


def refuse_report(path: str) -> None:
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise PosencError(f"A report cannot be written as {path!r}: name it with one of {', '.join(SUFFIXES)}.")
    if suffix == ".png" and find_spec("matplotlib") is None:
        raise missing_package("matplotlib", "eval", PNG)


def refuse_unwritable(option: str, path: Path, replaced: bool) -> None:
    """Try to write, and leave nothing behind. A file that is `replaced` is first written beside the old one."""
    if path.is_dir():
        raise PosencError(f"{option} {path} is a directory; give the file to write.")
    if not path.parent.is_dir():
        raise PosencError(f"{option} {path} cannot be written: there is no directory {path.parent}. Make it first.")
    try:
        if replaced or not path.exists():
            tempfile.TemporaryFile(dir=path.parent).close()
        elif path.is_file():  # opening a pipe would wait for its reader
            path.open("ab").close()
    except OSError as error:
        raise PosencError(f"{option} {path} cannot be written: {error.strerror}. Name another place.") from None


def write(rows: Sequence[Row], json_file: str | None, report: str | None, about: dict[str, Any]) -> None:
    if json_file is not None:
        Path(json_file).write_text(json.dumps([row.to_dict() for row in rows], indent=1) + "\n", encoding="utf-8")
    if report is not None:
        told = {
            **about,
            "text": ", ".join(Path(name).name for name in about["text"] or []),
            "date": date.today().isoformat(),
            "command": "hf-posenc " + " ".join(sys.argv[1:]),
            "versions": f"torch {version('torch')}, transformers {version('transformers')}, {platform.machine()}",
        }
        write_report(rows, report, told)
