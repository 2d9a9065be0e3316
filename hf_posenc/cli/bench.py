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
    steps: Annotated[int | None, typer.Option(min=1, help="Default of this and all below: the task's own.")] = None,
    batch: Annotated[int | None, typer.Option(min=1)] = None,
    bucket: Annotated[int | None, typer.Option(min=1, help="Batches drawn at once, and sorted by length.")] = None,
    learning_rate: Annotated[float | None, typer.Option(min=0)] = None,
    layers: Annotated[int | None, typer.Option(min=1)] = None,
    hidden: Annotated[int | None, typer.Option(min=1)] = None,
    heads: Annotated[int | None, typer.Option(min=1)] = None,
    alphabet: Annotated[int | None, typer.Option(min=1, max=100, help="repeat_one, copy, reverse.")] = None,
    processes: Annotated[int, typer.Option(min=0, help="Parallel processes; 0: one for each core.")] = 0,
) -> None:
    """Train small decoders from scratch at lengths up to 20, and measure exact match at longer ones.

    \b
    hf-posenc bench length-generalisation --tasks repeat_one --schemes none,t5,alibi,rope,sinusoidal
    hf-posenc bench length-generalisation --tasks repeat_one,copy,reverse,addition,scan,stdlib
    """
    from ..training.length_bench.command import bench as run_all  # slow to import
    from ..training.length_bench.command import jobs_of
    from ..training.length_bench.runs import SCHEME_NAMES

    names = [name for name in schemes.split(",") if name] or list(SCHEME_NAMES)
    asked = dict(steps=steps, batch=batch, bucket=bucket, learning_rate=learning_rate, layers=layers)
    asked |= dict(hidden=hidden, heads=heads, alphabet=alphabet)
    changed = {name: value for name, value in asked.items() if value is not None}
    jobs = jobs_of(tasks.split(","), names, seeds, changed)
    print(run_all(jobs, out, processes or os.cpu_count() or 1))


bench.command("length-generalisation")(with_plain_errors(length_generalisation))
