"""A GGUF file put in its place only once llama.cpp, where it is installed, has read it right."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ...errors import PosencError
from .. import llama_cpp
from ..proof import Proof


def check_existing(path: Path) -> None:
    if path.exists():
        raise PosencError(f"{path} exists already. Name another file, or remove it first.")


def place(
    path: Path, write: Callable[[Path], object], proved: Callable[[Path], Proof], otherwise: str = ""
) -> Proof | None:
    """Write a file beside `path`, prove it, and move it there with its figures; what differs is not left behind.

    `otherwise`: what to ask oneself if it differs.
    """
    part = path.with_name(path.name + ".part")
    try:
        write(part)
        proof = proved(part) if llama_cpp.version() else None
        if proof is not None and not proof.holds:
            raise PosencError(f"Nothing is written: {proof}.{otherwise}")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    if proof is not None:
        proof.write(path.with_name(path.name + ".proof.json"))
    return proof
