"""Ranks of schemes, as far as paired error bars can tell them apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from ..measures.estimates import differ
from ..measures.rows import Row


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The ranks a scheme may have at a length: below clearly better ones, above clearly worse ones."""

    task: str
    protocol: str
    length: int
    scheme: str
    rank: int
    lowest: int
    value: float
    stderr: float | None
    tied: tuple[str, ...]
    """Schemes that do not differ significantly from this one."""


def standings(rows: Sequence[Row]) -> list[Standing]:
    """Schemes in order of loss at each length. Those that do not differ significantly share a rank."""
    groups: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        if row.metric == "loss" and row.task != "shift" and "losses" in row.details:
            groups.setdefault((row.task, row.protocol, row.length), []).append(row)
    found = []
    for (task, protocol, length), group in sorted(groups.items()):
        group.sort(key=lambda row: row.value)
        pairs = len(list(combinations(group, 2))) or 1
        for row in group:
            apart = {
                other.scheme
                for other in group
                if other is not row and differ(row.details["losses"], other.details["losses"], pairs)
            }
            better = [other for other in group if other.scheme in apart and other.value < row.value]
            worse = len(apart) - len(better)
            tied = tuple(other.scheme for other in group if other is not row and other.scheme not in apart)
            found.append(
                Standing(
                    task=task,
                    protocol=protocol,
                    length=length,
                    scheme=row.scheme,
                    rank=1 + len(better),
                    lowest=len(group) - worse,
                    value=row.value,
                    stderr=row.stderr,
                    tied=tied,
                )
            )
    return found
