"""The command that runs a recipe: `hf-posenc train`, and `-m hf_posenc.training` for launchers."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..errors import PosencError
from .recipe_files import recipe_path

USAGE = """Fine-tune a model with other positions, to read longer texts.

    hf-posenc train RECIPE [--section.key=value ...] [--resume] [--merge] [--control] [--dry-run]
    accelerate launch -m hf_posenc.training RECIPE ...

RECIPE is the name of one that comes with the package (`hf-posenc recipes` lists them) or a YAML file of your own;
--section.key=value overrides its keys. --resume continues from the newest complete checkpoint. --merge also writes the
merged model. --control also trains the unpatched model on the same rows, for comparison. --dry-run shows what a run
would read and need, and its first row, without training."""
FLAGS = frozenset({"--resume", "--merge", "--control", "--dry-run"})


def main(words: Sequence[str]) -> None:
    """Run a recipe; errors are printed as messages."""
    if {"--help", "-h"} & set(words):
        print(USAGE)
        return
    named = [word for word in words if not word.startswith("-")]
    if len(named) != 1:
        sys.exit(USAGE)
    try:
        recipe_path(named[0])  # before slow imports
        _run(named[0], words)
    except PosencError as error:
        # Not wrapped, so that paths and commands can be copied.
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)


def _run(name: str, words: Sequence[str]) -> None:
    from .settings_file import read_settings

    settings = read_settings(name, [word for word in words if word not in FLAGS and word != name])
    from transformers.utils import logging

    from .dry_run import dry_run
    from .recipe import train

    logging.set_verbosity_error()
    if "--dry-run" in words:
        dry_run(settings, "--merge" in words)
        return
    train(settings, "--resume" in words, "--merge" in words, control="--control" in words)
