"""`hf-posenc lm-eval ...`: lm-eval's command line, with our models, and without options that would mislead."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ...errors import PosencError
from ...extras import require
from ...models import model_path
from .harness import refuse_meaningless, task_names

ABSENT = -1
"""The score that RULER prints for a length that was not run."""


def run_lm_eval(args: list[str]) -> None:
    """Run lm-eval's command line on `args`, with `--model hf-posenc` registered."""
    require("lm_eval", "eval", "`hf-posenc lm-eval`")
    from lm_eval.utils import setup_logging

    from ...compat.harness import command_line, results_through
    from . import harness_model  # noqa: F401  registers the model

    setup_logging()
    before = sys.argv
    sys.argv = ["hf-posenc lm-eval", *args]  # where lm-eval reads them
    try:
        command = command_line()
        given = command.parse_args()
        if getattr(given, "command", None) == "run":
            refuse_traps(given)
            given.model_args = with_paths(given.model_args)
        with results_through(without_absent_lengths):
            execute(command, given)
    finally:
        sys.argv = before


def with_paths(model_args: dict[str, Any] | None) -> dict[str, Any] | None:
    """The arguments with the path of `tiny`: lm-eval's tasks load the tokenizer of that name themselves."""
    named = [key for key in ("pretrained", "tokenizer") if isinstance((model_args or {}).get(key), str)]
    return model_args and {**model_args, **{key: model_path(model_args[key]) for key in named}}


def execute(command: Any, given: argparse.Namespace) -> None:
    try:
        command.execute(given)
    except ValueError as error:
        if "Tasks not found" not in str(error):
            raise
        raise PosencError(f"lm-eval: {error}. `hf-posenc lm-eval ls tasks` lists those that it knows.") from None


def refuse_traps(given: argparse.Namespace) -> None:
    """Raise for arguments on which lm-eval would hang, or report something misleading."""
    metadata = {**(given.model_args or {}), **(given.metadata or {})}
    lengths = metadata.get("max_seq_lengths")
    tasks = [name for name in given.tasks or () if name.startswith(("niah_", "ruler")) and "*" not in name]
    if not tasks or not isinstance(lengths, list):
        return
    refuse_meaningless(task_names(",".join(tasks)), lengths)
    if given.limit is not None and len(lengths) > 1:
        raise PosencError(
            f"--limit takes RULER's first documents, which all have the length {lengths[0]}; the other lengths "
            "would not run. Give one length at a time, or --samples with indices (each length has 500 documents), or "
            f"use hf-posenc eval --harness {','.join(tasks)}, which spreads its samples over lengths."
        )


def without_absent_lengths(results: Any) -> Any:
    """Remove lengths that were not run, for which lm-eval reports -1."""
    for scores in [*results["results"].values(), *results.get("groups", {}).values()] if results else ():
        absent = {key.partition(",")[0] for key, value in scores.items() if key[0].isdigit() and value == ABSENT}
        for key in [key for key in scores if key.partition(",")[0].removesuffix("_stderr") in absent]:
            del scores[key]
    return results
