"""`hf-posenc bench`: compare schemes by training small models with them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from .messages import with_plain_errors

bench = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Train small models from scratch, and compare.")


@bench.callback()
def _group() -> None:
    """Train small models from scratch, and compare."""


def length_generalisation(
    out: Annotated[
        Path, typer.Option(help="Folder for results.jsonl, from which a run resumes, and for the page.")
    ] = Path("length-generalisation"),
    tasks: Annotated[
        str, typer.Option(help="Separated by commas: repeat_one, copy, reverse, addition, scan, stdlib.")
    ] = "repeat_one",
    schemes: Annotated[str, typer.Option(help="Separated by commas. Default: all nine.")] = "",
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    steps: Annotated[int, typer.Option(min=1)] = 1000,
    layers: Annotated[int, typer.Option(min=1)] = 3,
    learning_rate: Annotated[float, typer.Option(min=0)] = 1e-3,
    processes: Annotated[int, typer.Option(min=0, help="Parallel processes; 0: one for each core.")] = 0,
) -> None:
    """Train small decoders from scratch at lengths up to 20, and measure exact match at longer ones.

    \b
    hf-posenc bench length-generalisation --tasks repeat_one --schemes none,t5,alibi,rope,sinusoidal
    hf-posenc bench length-generalisation --tasks repeat_one,copy,reverse,addition,scan,stdlib
    """
    from ..training.length_bench.command import bench as run_all  # slow to import
    from ..training.length_bench.runs import SCHEME_NAMES, Settings

    names = [name for name in schemes.split(",") if name] or list(SCHEME_NAMES)
    settings, cores = Settings(steps=steps, layers=layers, learning_rate=learning_rate), os.cpu_count() or 1
    print(run_all(tasks.split(","), names, seeds, settings, out, processes or cores))


bench.command("length-generalisation")(with_plain_errors(length_generalisation))
