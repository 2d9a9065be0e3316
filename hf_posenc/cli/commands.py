"""A command that explains itself when a list was written with spaces instead of commas."""

from __future__ import annotations

import os
from typing import Any

from typer.core import TyperCommand


class ListCommand(TyperCommand):
    """Explains how lists are written when there are too many arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.allow_extra_args = True
        rest: list[str] = super().parse_args(ctx, list(args))
        if rest and not ctx.resilient_parsing:
            ctx.fail(f"{' '.join(rest)!r} is one word too many. {explain_extra_words(rest, args)}")
        return rest


def explain_extra_words(rest: list[str], args: list[str]) -> str:
    """A hint on what was probably meant by the extra words."""
    if any(os.path.exists(word) for word in rest):
        return "Repeat --text for each file, or quote a pattern: --text 'books/*.txt'."
    lists = [word for word in ("--schemes", "--lengths", "--tasks", "--depths") if word in args]
    example = lists[0] if lists else "--lengths"
    after = args[args.index(example) + 1 :][:1] if lists else ["2k"]
    return f"Lists are written with commas and without spaces: {example} {','.join([*after, rest[-1]])}."
