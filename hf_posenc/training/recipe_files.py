"""The recipes and the launchers' files that come with the package, by name."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import PosencError, suggestion

HERE = Path(__file__).parent / "recipes"


def recipes() -> dict[str, Path]:
    """Every experiment that is ready to be run, by its name."""
    return {path.stem: path for path in sorted(HERE.glob("*.yaml"))}


def launchers() -> dict[str, Path]:
    """What `accelerate launch --config_file` takes, by its name."""
    return {path.stem: path for path in sorted((HERE / "accelerate").glob("*.yaml"))}


def recipe_path(name: str | os.PathLike[str]) -> Path:
    """The recipe of that name, or the user's own file."""
    given = os.fspath(name)
    if given in recipes() and not os.path.isfile(given):
        return recipes()[given]
    if os.path.isfile(given):
        return Path(given)
    raise PosencError(
        f"There is no recipe {given!r}: neither a file nor one of those that come with the package "
        f"(`hf-posenc recipes` lists them).{suggestion(given, list(recipes()))}"
    )


def file_path(name: str) -> Path:
    """Where a recipe or a launcher's file of the package lies."""
    every = {**launchers(), **recipes()}
    if name not in every:
        raise PosencError(f"The package has no recipe {name!r}.{suggestion(name, list(every))}")
    return every[name]


def launch_option(name: str) -> str:
    """How to launch with one of the package's files, for messages: the file is there wherever it was installed."""
    return f"--config_file {launchers()[name]}"


def description(path: Path) -> str:
    """What a file says of itself, in the comment below its command."""
    lines = path.read_text(encoding="utf-8").splitlines()
    said = [line.removeprefix("#").strip() for line in lines if line.startswith("#")]
    return " ".join(said[1:])
