"""Small trained models that are part of the package, so that they need no network."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import PosencError

HERE = Path(__file__).parent
NAMES = tuple(sorted(path.parent.name for path in HERE.glob("*/config.json")))


def model_path(name: str | os.PathLike[str]) -> str:
    """The path of a model of this package; any other name unchanged.

    Everything that takes the path of a model calls this, so that these names work everywhere.
    """
    given = os.fspath(name)
    if given not in NAMES:
        return given
    inside = HERE / given
    if os.path.isdir(given) and not os.path.samefile(given, inside):
        raise PosencError(
            f"{given!r} names both the model inside this package and a folder here. Write "
            f"{os.path.join(os.curdir, given)} for the folder, or {inside} for the model."
        )
    return str(inside)
