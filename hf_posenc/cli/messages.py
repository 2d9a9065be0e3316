"""How commands answer when something goes wrong: with a message alone, in one piece."""

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
"""What shells expect of a command that Ctrl-C has ended."""


@contextmanager
def plain_errors() -> Iterator[None]:
    """A user's mistake is answered with its message alone, and a warning is one line."""
    before = warnings.formatwarning
    warnings.formatwarning = lambda message, *_args, **_more: f"hf-posenc: warning: {message}\n"
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read the answer has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at its end
        raise typer.Exit(1) from None
    except (PosencError, OSError) as error:
        print_error(error_message(error))
        raise typer.Exit(2) from None
    finally:
        warnings.formatwarning = before


def print_error(text: str) -> None:
    print(f"hf-posenc: {text}", file=sys.stderr)


def error_message(error: Exception) -> str:
    """What went wrong; of the system's errors, with which file and what to do."""
    if not isinstance(error, OSError) or isinstance(error, PosencError) or error.filename is None:
        return str(error)
    where = f"{error.filename} -> {error.filename2}" if error.filename2 is not None else error.filename
    hint = " Check its owner and mode, or name another place." if isinstance(error, PermissionError) else ""
    return f"{where}: {error.strerror}.{hint}"


def with_plain_errors(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose errors and interruptions are answered plainly."""

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
    """What is kept of a run that was interrupted, and how to go on."""
    if "out" not in given or "lengths" not in given:
        return "interrupted."
    if given["out"] is None:
        return "interrupted. Nothing was kept: with --out FILE each result is, and the same command goes on from it."
    file = Path(given["out"])
    kept = max(file.read_bytes().count(b"\n") - 1, 0) if file.is_file() else 0
    results = "1 result is" if kept == 1 else f"{kept} results are"
    return f"interrupted. {results} kept in {file}: the same command goes on from there."
