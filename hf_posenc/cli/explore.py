"""`hf-posenc explore`: write a page to try schemes with sliders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import PosencError


def explore(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint: folder, hub name, or `tiny`.")] = "tiny",
    out: Annotated[Path, typer.Option(metavar="FILE", help="The page to write.")] = Path("explore.html"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace FILE.")] = False,
) -> None:
    """Write a page with sliders for scheme, factor and options, for the sizes of this model.

    It shows the wavelength of every pair, the predicted reach, and the command to patch with. The page is one file,
    and needs no network. Only the config is read, not the weights.

    \b
    hf-posenc explore
    hf-posenc explore my-llama --out my-llama.html
    """
    if out.exists() and not overwrite:
        raise PosencError(f"{out} exists already. Name another file with --out, or say --overwrite.")
    if not out.parent.is_dir():
        raise PosencError(f"There is no folder {out.parent} to write {out.name} into.")
    from ..explorer.page import explorer_of

    made = explorer_of(model)
    out.write_text(made, encoding="utf-8")
    print(f"{out} is written: open it in a browser.")
