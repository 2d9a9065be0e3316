"""`compare`: one model with several schemes in turn, on the same text and windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...patching.lengths import trained_length
from ..measures.processes import ALONE, Processes
from ..measures.rows import Row
from ..measures.texts import Document
from .decoders import compare_decoders
from .encoders import compare_encoders
from .entries import Entry
from .options import Options


def doublings(trained: int, target: int) -> tuple[int, ...]:
    """The trained length, twice it and so on, up to the target."""
    lengths = [trained]
    while lengths[-1] * 2 < target:
        lengths.append(lengths[-1] * 2)
    return tuple(sorted({*lengths, target}))


def compare(
    model: Any,
    tokenizer: Any,
    schemes: str | Sequence[Entry],
    documents: Sequence[Document],
    *,
    target_length: int,
    options: Options | None = None,
    out: Any = None,
    force: bool = False,
    quiet: bool = True,
    shared: Processes = ALONE,
) -> list[Row]:
    """Measure the unpatched model and every scheme, with their short-context taxes. The model is unpatched afterwards.

    A scheme extends to `target_length` unless its own options say otherwise.
    """
    options = options or Options(lengths=doublings(trained_length(model), target_length))
    run = compare_encoders if options.embeds else compare_decoders
    return run(
        model, tokenizer, schemes, documents, target_length=target_length, options=options, out=out, force=force,
        quiet=quiet, shared=shared,
    )  # fmt: skip
