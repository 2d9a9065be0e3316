"""A corpus that is everywhere: the manual and the sources of the Python that runs this, read offline."""

from __future__ import annotations

import hashlib
import sysconfig
import tokenize
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path

from ..errors import PosencError

HELD_OUT = 25
"""One text in so many is never trained on."""
SHORTEST = 400
"""Characters; empty packages and stubs teach nothing."""
OTHERS = {"site-packages", "dist-packages", "__pycache__", "lib-dynload", "ensurepip"}
"""Folders that hold what is not the standard library's own."""
TESTS = {"test", "tests", "idle_test"}
TABLES = {"encodings", "pydoc_data", "entities.py"}
"""Data in the dress of code; the manual in `pydoc_data` is read as text instead."""
SKIPPED = OTHERS | TESTS | TABLES
BUILT = ("_sysconfigdata", "_sysconfig_vars", "config-", "sitecustomize", "usercustomize")
"""How names begin of what a build or a machine has written."""


def stdlib_texts(held_out: bool = False) -> dict[str, str]:
    """Texts of the installation by name, in an order that is always the same.

    `library/*.py` are sources, `manual/*` topics of the language reference. With `held_out` the one in 25 that is for
    evaluation, else all others. Which those are follows from the name alone, so that it is the same in every version.
    """
    return {name: text for name, text in sorted([*sources(), *manual()]) if is_held_out(name) == held_out}


def is_held_out(name: str) -> bool:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % HELD_OUT == 0


def digest(texts: Mapping[str, str]) -> str:
    """What tells one corpus from another: installations of different versions differ."""
    found = hashlib.sha256()
    for name, text in texts.items():
        for part in (name, text):
            encoded = part.encode()
            found.update(len(encoded).to_bytes(8, "big") + encoded)
    return found.hexdigest()[:16]


def sources(root: Path | None = None) -> Iterator[tuple[str, str]]:
    """The modules of the standard library, without tests and data."""
    root = root or Path(sysconfig.get_path("stdlib"))
    found = False
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        if SKIPPED.isdisjoint(parts) and not parts[0].startswith(BUILT):
            found = True
            text = read_source(path)
            if len(text) >= SHORTEST:
                yield "/".join(("library", *parts)), text
    if not found:
        raise PosencError(
            "This Python carries no sources of its standard library (it may be an embedded or stripped build), and "
            "the stdlib corpus is made of them. Run it with an ordinary Python, or name texts of your own."
        )


def read_source(path: Path) -> str:
    """A module, in the encoding that it declares."""
    try:
        with tokenize.open(path) as file:
            return file.read()
    except (SyntaxError, UnicodeDecodeError) as error:
        raise PosencError(f"The module {path.name} of this Python cannot be read: {error}.") from None


def manual() -> Iterator[tuple[str, str]]:
    """The topics that `help()` knows: a good part of the language reference, in prose."""
    try:
        topics: dict[str, str] = import_module("pydoc_data.topics").topics
    except ImportError:
        raise PosencError(
            "This Python carries no manual (the module pydoc_data.topics), and the stdlib corpus is made of it. Run "
            "it with an ordinary Python, or name texts of your own."
        ) from None
    for name, text in topics.items():
        if len(text) >= SHORTEST:
            yield f"manual/{name}", text
