"""The short-context tax: the loss of a scheme at and below the trained length, minus the unpatched model's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from ...errors import PosencError
from ...patching.patch_state import journal_of, unwrap_model
from ..measures.estimates import mean_and_error
from ..measures.rows import Row

UNPATCHED = "unpatched"


def tax_lengths(trained: int, scored: int) -> list[int]:
    """The trained length and half of it, if a window holds more than the scored tokens."""
    return [length for length in (trained // 2, trained) if length > scored + 1]


def tax_rows(rows: Sequence[Row], trained: int) -> list[Row]:
    """The difference in loss on the same windows, from the rows of both models."""
    base = {row.length: row for row in rows if counts(row, trained) and row.scheme == UNPATCHED}
    found = []
    for row in rows:
        if not counts(row, trained) or row.scheme == UNPATCHED or row.length not in base:
            continue
        own, others = row.details["losses"], base[row.length].details["losses"]
        value, error = mean_and_error([a - b for a, b in zip(own, others, strict=True)])
        details = {
            "how": "loss patched less loss unpatched, paired over the same windows (protocol last)",
            "patched": row.value,
            "unpatched": base[row.length].value,
            "trained_length": trained,
            "windows": row.n,
            "tokens": row.details["tokens"],
            "seeds": 0,
        }
        made = Row(
            task="tax", protocol="last", scheme=row.scheme, length=row.length, metric="loss", value=value,
            stderr=error, n=row.n, details=details,
        )  # fmt: skip
        found.append(made)
    return found


def counts(row: Row, trained: int) -> bool:
    return (row.task, row.protocol, row.metric) == ("perplexity", "last", "loss") and row.length <= trained


@contextmanager
def positions_undone(model: Any) -> Iterator[None]:
    """The model without its patch and without adapters, within a `with` block."""
    journal = journal_of(unwrap_model(model))
    assert journal is not None
    if journal.final is not None:
        raise PosencError(f"The patch cannot be undone: {journal.final}.")
    with ExitStack() as stack:
        if hasattr(model, "disable_adapter"):
            stack.enter_context(model.disable_adapter())
        journal.undo()
        try:
            yield
        finally:
            journal.apply()
