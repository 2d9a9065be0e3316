"""The result of a run in one sentence that the error bars support."""

from __future__ import annotations

from collections.abc import Sequence

from ..measures.estimates import differ, mean_and_error
from ..measures.retrieval import accuracy
from ..measures.rows import Row
from .standings import standings
from .tax import UNPATCHED

COSTLY = 0.1
"""Nats of loss on short texts from which a scheme is said to need training."""


def verdict(rows: Sequence[Row]) -> str:
    """Which scheme is best and by how much; for a single model, how its loss changes. Empty if nothing can be said."""
    said = _of_losses(rows) or _of_accuracy(rows)
    costly = costs(rows)
    return "; ".join(filter(None, (said, costly))) + "." if said or costly else ""


def _of_losses(rows: Sequence[Row]) -> str:
    """Compare losses at the longest length."""
    found = standings(rows)
    if not found:
        return ""
    places = [s for s in found if (s.task, s.protocol) == (found[0].task, found[0].protocol)]
    end = max(s.length for s in places)
    group = sorted((s for s in places if s.length == end), key=lambda s: s.value)
    own = {
        (row.scheme, row.length): row.details["losses"]
        for row in rows
        if row.metric == "loss" and (row.task, row.protocol) == (found[0].task, found[0].protocol)
    }
    if len(group) == 1:
        return _verdict_on_one(group[0].scheme, own)
    first = [s.scheme for s in group if s.rank == 1]
    others = [scheme for scheme in first if scheme != UNPATCHED]
    if UNPATCHED in first and others:
        return f"At {end} tokens {join_names(others)} cannot be told from the unpatched model"
    led = f"At {end} tokens {join_names(first)} {'is first' if len(first) == 1 else 'are level'}"
    if UNPATCHED in first or (UNPATCHED, end) not in own:
        return led
    mean = [sum(values) / len(first) for values in zip(*(own[scheme, end] for scheme in first), strict=True)]
    value, error = mean_and_error([a - b for a, b in zip(own[UNPATCHED, end], mean, strict=True)])
    return f"{led}, {value:.2f}{error_suffix(error)} nats better than {UNPATCHED} (n = {len(mean)})"


def _verdict_on_one(scheme: str, own: dict[tuple[str, int], list[float]]) -> str:
    """For one model: its loss at the longest length against the shortest, on the same scored tokens."""
    lengths = sorted(length for name, length in own if name == scheme)
    low, high = own[scheme, lengths[0]], own[scheme, lengths[-1]]
    if len(lengths) < 2 or len(low) != len(high):
        return ""
    value, error = mean_and_error([b - a for a, b in zip(low, high, strict=True)])
    moved = "stays level" if not differ(low, high) else "rises" if value > 0 else "falls"
    how = (
        f"{moved} ({value:+.2f}{error_suffix(error)} nats"
        if moved == "stays level"
        else f"{moved} by {abs(value):.2f}"
    )
    end = f", n = {len(low)})" if moved == "stays level" else f"{error_suffix(error)} nats (n = {len(low)})"
    return f"From {lengths[0]} to {lengths[-1]} tokens the loss of {scheme} {how}{end}"


def _of_accuracy(rows: Sequence[Row]) -> str:
    """If no loss was measured: the accuracy of the first task at the longest length, over all depths."""
    scores = [row for row in rows if row.metric == "accuracy"]
    if not scores:
        return ""
    task = scores[0].task
    scores = [row for row in scores if row.task == task]
    end, protocol = max(row.length for row in scores), scores[-1].protocol
    shares = []
    for scheme in dict.fromkeys(row.scheme for row in scores):
        own = [r for r in scores if (r.scheme, r.task, r.protocol, r.length) == (scheme, task, protocol, end)]
        n = sum(row.n for row in own)
        if n:
            value = sum(row.value * row.n for row in own) / n
            shares.append((value, accuracy([value] * n)[1], scheme, n))
    told = [
        f"{scheme} {value:.2f}{error_suffix(error)} (n = {n})"
        for value, error, scheme, n in sorted(shares, reverse=True)
    ]
    return f"At {end} tokens the share of {task} that is right ({protocol}): {', '.join(told)}" if told else ""


def costs(rows: Sequence[Row]) -> str:
    """The schemes with a clear loss of quality on short texts."""
    taxes = [row for row in rows if row.task == "tax" and row.stderr is not None]
    longest = {row.scheme: row for row in sorted(taxes, key=lambda row: row.length)}
    dear = [row for row in longest.values() if row.value - 2 * (row.stderr or 0.0) > COSTLY]
    if not dear:
        return ""
    said = ", ".join(
        f"{row.scheme} costs {row.value:.2f}{error_suffix(row.stderr)} nats on short text" for row in dear
    )
    return f"{said}: {'it needs' if len(dear) == 1 else 'they need'} training"


def join_names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def error_suffix(error: float | None) -> str:
    return "" if error is None else f" ± {error:.2f}"
