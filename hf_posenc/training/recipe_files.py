"""The recipes and the accelerate configs of the package, by name."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import PosencError, suggestion

HERE = Path(__file__).parent / "recipes"


def recipes() -> dict[str, Path]:
    """The recipes of the package, by name."""
    return {path.stem: path for path in sorted(HERE.glob("*.yaml"))}


def launchers() -> dict[str, Path]:
    """The accelerate configs of the package, by name."""
    return {path.stem: path for path in sorted((HERE / "accelerate").glob("*.yaml"))}


def recipe_path(name: str | os.PathLike[str]) -> Path:
    """The file of a recipe: one of the package by name, or the user's own."""
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
    """The path of a recipe or accelerate config of the package."""
    every = {**launchers(), **recipes()}
    if name not in every:
        raise PosencError(f"The package has no recipe {name!r}.{suggestion(name, list(every))}")
    return every[name]


def launch_option(name: str) -> str:
    """The option to launch with an accelerate config of the package, for messages."""
    return f"--config_file {launchers()[name]}"


def description(path: Path) -> str:
    """The description of a file, from the comment below its command."""
    lines = path.read_text(encoding="utf-8").splitlines()
    said = [line.removeprefix("#").strip() for line in lines if line.startswith("#")]
    command = next(n for n, line in enumerate(said) if not line.endswith("\\"))  # which may go on over several lines
    return " ".join(said[command + 1 :])
