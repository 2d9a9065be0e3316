"""`hf-posenc train`, and `hf-posenc recipes`, which lists the recipes of the package."""

from __future__ import annotations

from typing import Annotated

import typer

ANY_WORDS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Options pass through unchanged: they are keys of the recipe, and checked with it."""


def train(context: typer.Context) -> None:
    """Fine-tune a model by a recipe: a name of `hf-posenc recipes`, or a YAML file."""
    from ..training.command import main  # slow to import

    main(context.args)


def show_recipes(
    name: Annotated[str | None, typer.Argument(help="Print only the path of this one.")] = None,
) -> None:
    """The recipes that come with the package, and the files for `accelerate launch --config_file`."""
    from rich.console import Console
    from rich.table import Table

    from ..training.recipe_files import description, file_path, launchers, recipes

    if name is not None:
        print(file_path(name))
        return
    console = Console()
    for what, files in {"hf-posenc train": recipes(), "accelerate launch --config_file": launchers()}.items():
        table = Table(what, "", box=None, padding=(0, 2, 0, 0))
        for known, path in files.items():
            table.add_row(known, description(path))
        console.print(table)
