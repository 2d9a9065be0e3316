"""The command line: `hf-posenc`, also `python -m hf_posenc`."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.table import Table

from .families import FAMILIES
from .grades import MEANING, cells
from .schemes import SCHEMES

app = typer.Typer(help="Swap how a Hugging Face model knows positions, and back.", no_args_is_help=True)


@app.callback()
def main() -> None:
    """Swap how a Hugging Face model knows positions, and back."""


@app.command()
def schemes() -> None:
    """Every scheme, on every family, and who can load the result."""
    grades = cells()
    table = Table("scheme", *FAMILIES, "what it does", box=None)
    for name, scheme in SCHEMES.items():
        table.add_row(name, *(grades[name, f].partition(":")[0] for f in FAMILIES), scheme.summary)
    console = Console()
    console.print(table)
    console.print()
    for grade, meaning in MEANING.items():
        console.print(f"{grade}: {meaning}")
    for (name, family), grade in grades.items():
        if grade.startswith("refused"):
            console.print(f"{name} on {family} is {grade}")


@app.command()
def families() -> None:
    """Every family and the model types that it serves."""
    table = Table("family", "own positions", "model types", box=None)
    for family in FAMILIES.values():
        table.add_row(family.name, family.positions, ", ".join(family.model_types))
    Console().print(table)
