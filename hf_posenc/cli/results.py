"""Results on the terminal: for a comparison the ranking first, then the figures behind it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..evaluation.measures.rows import Row
from ..evaluation.runs.standings import Standing, standings
from ..evaluation.runs.verdict import verdict
from .tables import paragraph, table

COLUMNS = ("task", "protocol", "scheme", "length", "depth", "metric", "value ±stderr", "n")


def with_error(value: float, error: float | None) -> str:
    return f"{value:.4f}" if error is None else f"{value:.4f} ±{error:.4f}"


def print_rows(rows: Sequence[Row]) -> None:
    """Print one line for each row."""
    lines = []
    for row in rows:
        depth, value = str(row.details.get("depth", "")), with_error(row.value, row.stderr)
        lines.append([row.task, row.protocol, row.scheme, str(row.length), depth, row.metric, value, str(row.n)])
    if lines:
        print(table(COLUMNS, lines))


def rank_range(standing: Standing) -> str:
    """`2`, or `2-4` if the error bars allow several ranks."""
    return f"{standing.rank}" if standing.rank == standing.lowest else f"{standing.rank}-{standing.lowest}"


def print_comparison(rows: Sequence[Row]) -> None:
    """Print the verdict, the losses with their ranks, the loss of quality on short texts, and all other tasks."""
    if said := verdict(rows):
        print(paragraph(said) + "\n")
    print_standings(standings(rows))
    taxes = [row for row in rows if row.task == "tax"]
    if taxes:
        print(
            paragraph("Short-context tax: loss above the unpatched model's, at and below the trained length, paired.")
        )
        print(length_table(taxes, [with_error(row.value, row.stderr) for row in taxes]) + "\n")
    rest = [row for row in rows if row.task not in ("perplexity", "tax")]
    for task, protocol, metric in dict.fromkeys((row.task, row.protocol, row.metric) for row in rest):
        group = [row for row in rest if (row.task, row.protocol, row.metric) == (task, protocol, metric)]
        print_other_rows(f"{task}, {protocol}: {metric}", group)


def print_standings(found: Sequence[Standing]) -> None:
    for task, protocol in dict.fromkeys((s.task, s.protocol) for s in found):
        group = [s for s in found if (s.task, s.protocol) == (task, protocol)]
        longest = max(s.length for s in group)
        order = [s.scheme for s in sorted(group, key=lambda s: s.value) if s.length == longest]
        group.sort(key=lambda s: order.index(s.scheme) if s.scheme in order else len(order))
        print(
            paragraph(
                f"{task}, {protocol}: loss ±stderr. In brackets: the range of ranks compatible with the error bars "
                "(paired windows, 95 % over all pairs of a length)."
            )
        )
        print(length_table(group, [f"{with_error(s.value, s.stderr)} ({rank_range(s)})" for s in group]) + "\n")


def length_table(found: Sequence[Standing | Row], cells: Sequence[str]) -> str:
    """A table with one line for each scheme and one column for each length."""
    at = {(item.scheme, item.length): cell for item, cell in zip(found, cells, strict=True)}
    lengths = sorted({length for _, length in at})
    schemes = dict.fromkeys(scheme for scheme, _ in at)
    rows = [[scheme, *(at.get((scheme, length), "-") for length in lengths)] for scheme in schemes]
    return table(["scheme", *map(str, lengths)], rows)


def print_other_rows(title: str, rows: Sequence[Row]) -> None:
    """Print a task, pooled over depths if it has several: --json and --report keep each depth."""
    if any("depth" in row.details for row in rows):
        print(paragraph(f"{title} over all depths ±stderr (trials); each depth is in --json and --report."))
        pooled = [pooled_accuracy([r for r in rows if (r.scheme, r.length) == key]) for key in scheme_lengths(rows)]
        firsts = [next(r for r in rows if (r.scheme, r.length) == key) for key in scheme_lengths(rows)]
        print(length_table(firsts, pooled) + "\n")
    elif len(scheme_lengths(rows)) == len(rows):
        print(paragraph(f"{title} ±stderr (n)."))
        print(length_table(rows, [f"{with_error(row.value, row.stderr)} ({row.n})" for row in rows]) + "\n")
    else:
        print_rows(rows)


def scheme_lengths(rows: Sequence[Row]) -> list[tuple[str, int]]:
    return list(dict.fromkeys((row.scheme, row.length) for row in rows))


def pooled_accuracy(rows: Sequence[Row]) -> str:
    """The share of all trials. Its error is Agresti and Coull's, which is not 0 even if all trials end alike."""
    n = sum(row.n for row in rows)
    total = math.fsum(row.value * row.n for row in rows)
    share = (total + 2) / (n + 4)
    return f"{total / n:.2f} ±{math.sqrt(share * (1 - share) / (n + 4)):.2f} ({n})"
