"""Models that come with the package: small, real, and there without a network."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import PosencError

HERE = Path(__file__).parent
NAMES = tuple(sorted(path.parent.name for path in HERE.glob("*/config.json")))


def model_path(name: str | os.PathLike[str]) -> str:
    """Where a model of the package lies; any other name as it is.

    Whatever takes the path of a model asks here, so that such a name is understood everywhere.
    """
    given = os.fspath(name)
    if given not in NAMES:
        return given
    inside = HERE / given
    if os.path.isdir(given) and not os.path.samefile(given, inside):
        raise PosencError(
            f"{given!r} is the model inside this package, and there is a folder of that name here too. Write "
            f"{os.path.join(os.curdir, given)} for the folder, or {inside} for the model."
        )
    return str(inside)
