"""How figures were measured: the explanation of each task and protocol, with windows, tokens and seeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..measures.rows import Row
from .explanations import PROTOCOLS, TASKS, task_title
from .views import span

COUNTED = ("windows", "documents", "tokens", "trials", "seeds", "seed", "stride", "scored", "distractors")
PLACED = ("title", "command", "places", "verdict")
"""Facts that the page shows elsewhere."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    name: str
    words: str
    counts: str


def task_entries(rows: Sequence[Row]) -> list[Entry]:
    """For each task and protocol: its explanation, and the number of samples."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.task, row.protocol), []).append(row)
    entries = []
    for (task, protocol), group in groups.items():
        words = [TASKS.get(task, "")]
        if task not in ("loss_by_position", "tax"):  # whose own words say all of it
            words.append(PROTOCOLS.get(protocol) or str(group[0].details.get("how", "")))
        entries.append(
            Entry(name=f"{task_title(task)}, {protocol}", words=" ".join(filter(None, words)), counts=counts(group))
        )
    return entries


def counts(rows: Sequence[Row]) -> str:
    """The number of samples and all counts in the details of rows, as numbers or ranges."""
    parts = [f"n: {span([row.n for row in rows])}"]
    for key in COUNTED:
        found = [row.details[key] for row in rows if key in row.details]
        values = [v for value in found for v in (value if isinstance(value, list) else [value])]
        if values and all(isinstance(value, int | float) for value in values):
            parts.append(f"{key}: {span(values)}")
    lengths = sorted({row.length for row in rows})
    parts.append(f"{len(rows)} figures at {len(lengths)} lengths" if len(rows) > 1 else "1 figure")
    return " · ".join(parts)


def about_items(about: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Other facts about the run, one for each line; mappings such as versions are flattened."""
    for name, value in about.items():
        if name in PLACED or value is None:
            continue
        if isinstance(value, Mapping):
            value = ", ".join(f"{key} {inner}" for key, inner in value.items())
        elif isinstance(value, list | tuple):
            value = ", ".join(map(str, value))
        yield name.replace("_", " "), str(value)
