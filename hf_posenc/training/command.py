"""The command that runs a recipe: `hf-posenc train`, and `-m hf_posenc.training` for launchers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches

from ..errors import PosencError
from ..extras import require_all
from .recipe_files import recipe_path

USAGE = """Fine-tune a model with other positions, to read longer texts.

    hf-posenc train RECIPE [--section.key=value ...] [--resume] [--merge] [--control] [--dry-run]
    accelerate launch -m hf_posenc.training RECIPE ...

RECIPE is the name of one that comes with the package (`hf-posenc recipes` lists them) or a YAML file of your own;
--section.key=value overrides its keys. --resume continues from the newest complete checkpoint. --merge also writes the
merged model. --control also trains the unpatched model on the same rows, for comparison. --dry-run shows what a run
would read and need, and its first row, without training."""
FLAGS = frozenset({"--resume", "--merge", "--control", "--dry-run"})


INTERRUPTED = 130
"""The exit code of a command that was stopped by Ctrl-C, by the convention of shells."""


def main(words: Sequence[str]) -> None:
    """Run a recipe; errors are printed as messages."""
    if {"--help", "-h"} & set(words):
        print(USAGE)
        return
    named = [word for word in words if not word.startswith("-")]
    if not named:
        sys.exit(USAGE)
    try:
        _refuse_extra_words(named[1:], words)
        recipe_path(named[0])  # before slow imports
        require_all("train", "`hf-posenc train`")
        _run(named[0], words)
    except PosencError as error:
        # Not wrapped, so that paths and commands can be copied.
        print(f"hf-posenc: {error}", file=sys.stderr)
        sys.exit(2)


def _refuse_extra_words(extra: Sequence[str], words: Sequence[str]) -> None:
    """Explain what the other commands allow and recipes do not: `--key value`, without an equals sign."""
    if not extra:
        return
    before = words[words.index(extra[0]) - 1] if words.index(extra[0]) else ""
    if before.startswith("--") and "=" not in before and before not in FLAGS:
        raise PosencError(
            f"{extra[0]!r} is one word too many. Keys of a recipe take an equals sign: {before}={extra[0]}"
        )
    raise PosencError(f"{extra[0]!r} is one word too many: one recipe is run at a time.")


def _run(name: str, words: Sequence[str]) -> None:
    given = [word for word in words if word not in FLAGS and word != name]
    for word in given:
        close = get_close_matches(word, FLAGS, n=1)
        if "=" not in word and close:
            raise PosencError(f"There is no {word}. Did you mean {close[0]}?")
    from .settings_file import read_settings

    settings = read_settings(name, given)
    from transformers.utils import logging

    from .dry_run import dry_run
    from .recipe import train

    logging.set_verbosity_error()
    if "--dry-run" in words:
        dry_run(settings, "--merge" in words)
        return
    try:
        train(settings, "--resume" in words, "--merge" in words, control="--control" in words)
    except KeyboardInterrupt:
        print(f"hf-posenc: interrupted. {_kept(settings.output)}", file=sys.stderr)
        sys.exit(INTERRUPTED)


def _kept(output: str) -> str:
    """How an interrupted run goes on."""
    from pathlib import Path

    from .manifest import newest_whole

    found = newest_whole(Path(output)).checkpoint
    if found is None:
        return f"{output} holds no checkpoint yet: the same command starts again."
    return f"{found} is kept: the same command with --resume goes on from it."
