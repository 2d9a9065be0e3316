"""Errors and interruptions as messages, without a traceback."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import typer

from ..errors import PosencError

INTERRUPTED = 130
"""The exit code of a command that was stopped by Ctrl-C, by the convention of shells."""


@contextmanager
def plain_errors() -> Iterator[None]:
    """Print our errors and those of the file system as messages, and warnings as one line each."""
    before = warnings.formatwarning
    warnings.formatwarning = lambda message, *_args, **_more: f"hf-posenc: warning: {message}\n"
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of a pipe, such as head, has closed it
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # otherwise Python prints an error when it exits
        raise typer.Exit(1) from None
    except (PosencError, OSError) as error:
        print_error(error_message(error))
        raise typer.Exit(2) from None
    finally:
        warnings.formatwarning = before


def print_error(text: str) -> None:
    print(f"hf-posenc: {text}", file=sys.stderr)


def error_message(error: Exception) -> str:
    """The text of an error; for errors of the file system with the file and what to do about it."""
    if not isinstance(error, OSError) or isinstance(error, PosencError) or error.filename is None:
        return str(error)
    where = f"{error.filename} -> {error.filename2}" if error.filename2 is not None else error.filename
    hint = " Check its owner and mode, or name another place." if isinstance(error, PermissionError) else ""
    return f"{where}: {error.strerror}.{hint}"


def with_plain_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command so that it ends with a message when it fails or is interrupted."""

    @wraps(command)
    def run(**given: Any) -> None:
        with plain_errors():
            try:
                command(**given)
            except KeyboardInterrupt:
                print_error(interruption_message(given))
                raise typer.Exit(INTERRUPTED) from None

    return run


def interruption_message(given: dict[str, Any]) -> str:
    """How many results of an interrupted run were kept, and how to resume it."""
    if "out" not in given or "lengths" not in given:
        return "interrupted."
    if given["out"] is None:
        return "interrupted. Nothing was kept: with --out FILE each result is, and the same command resumes the run."
    file = Path(given["out"])
    kept = max(file.read_bytes().count(b"\n") - 1, 0) if file.is_file() else 0
    results = "1 result is" if kept == 1 else f"{kept} results are"
    return f"interrupted. {results} kept in {file}: the same command resumes the run."
