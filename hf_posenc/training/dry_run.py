"""`--dry-run`: print what a run would read, need and write. It makes all checks, but does not train."""

from __future__ import annotations

from dataclasses import asdict
from itertools import islice

import psutil  # type: ignore[import-untyped]
from rich.console import Console
from rich.table import Table

from .estimate import estimate_step
from .recipe import Run, prepare
from .rows import IGNORED
from .settings import Settings
from .trainer import rows_a_step
from .tuning import estimate_trainable

SOME = 32
"""Rows from which shares of tokens are computed."""
SHOWN = 300
"""Characters shown of each end of the first row."""
GB = 1e9
ERROR = 0.3
"""The tested error of the memory estimate, for dense decoders."""


def dry_run(settings: Settings, merged: bool = False) -> None:
    """Print what a run would do."""
    run = prepare(settings, merged=merged)
    a_step, steps = rows_a_step(run.args), settings.train.max_steps
    rows = list(islice(iter(run.rows), SOME))
    every = sum(row["input_ids"].numel() for row in rows)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    learned = sum(int((row["labels"] != IGNORED).sum()) for row in rows if "labels" in row)
    padding = sum(int(row["padding"]) for row in rows if "padding" in row)
    for name, value in {
        "text": run.data,
        "rows": f"{a_step * steps:,}, {a_step} a step on {run.args.world_size} process(es)",
        "tokens": f"{run.rows.plan.tokens(a_step * steps):,}",
        "steps": f"{steps:,}",
        "learned": f"{learned / every:.0%} of the tokens of {len(rows)} rows; {padding / every:.1%} are padding",
        "parameters": f"{estimate_trainable(run.model, settings.tune):,} trained, {run.parameters:,} in the model",
        **memory_lines(run),
        "written": f"to {settings.output}",
    }.items():
        table.add_row(name, value)
    console = Console()
    console.print(table)
    text = run.tokenizer.decode(rows[0]["input_ids"])
    console.print("\nthe first row:", style="bold")
    console.print(text if len(text) <= 2 * SHOWN else f"{text[:SHOWN]}\n[...]\n{text[-SHOWN:]}", markup=False)


def memory_lines(run: Run) -> dict[str, str]:
    """Estimated memory of a step on each device with whole parameters, and the error of the estimate."""
    step = estimate_step(run.model, run.settings)
    told = {
        "memory": f"about {step.peak / GB:.1f} GB of tensors a process, give or take {ERROR:.0%}",
        "of which": ", ".join(f"{name} {value / GB:.2f}" for name, value in asdict(step).items()),
    }
    if run.args.device.type == "cpu":
        now = max(0.0, psutil.Process().memory_info().rss - step.weights) / GB
        told["beside it"] = f"{now:.1f} GB that the process has now, and freed memory that the system keeps"
    return told
