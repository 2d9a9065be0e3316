"""The table of runtimes as Markdown for the documentation. `make docs` calls it."""

from __future__ import annotations

from .kinds import KINDS
from .table import ANY, RUNTIMES, Entry, entries, look_up

SAVED_KEYS = frozenset(
    {
        *("rope_theta", "rope_scaling", "n_layers"),
        *(f"rope_parameters.{key}" for key in ("short_mscale", "long_mscale", "mscale", "mscale_all_dim")),
    },
)
"""Keys that this version also writes into config.json for runtimes that read them."""
WORDS = {"right": "right", "refuses": "refuses", "wrong": "**wrong**", "untried": "-"}


def runtimes_markdown() -> str:
    """One table for each runtime except transformers itself."""
    return "\n\n".join(_runtime_part(runtime) for runtime in RUNTIMES if runtime != "transformers")


def _runtime_part(runtime: str) -> str:
    known = [entry for entry in entries() if entry.runtime == runtime]
    types = sorted({entry.architecture for entry in known} - {ANY}) or ["any"]
    rows = [f"| {RUNTIMES[runtime]} | {' | '.join(types)} |", "|---" * (len(types) + 1) + "|"]
    for kind in KINDS:
        cells = [table_cell(runtime, architecture, kind) for architecture in types]
        if set(cells) != {"-"}:
            rows.append(f"| {kind} | {' | '.join(cells)} |")
    versions = sorted({f"{entry.version} ({entry.basis}, {_last_date(known, entry)})" for entry in known})
    return "\n".join([*rows, "", f"{RUNTIMES[runtime]}: {'; '.join(versions) or 'nothing is known yet'}."])


def _last_date(known: list[Entry], entry: Entry) -> str:
    """The latest date of the entries about this version."""
    return max(one.date for one in known if (one.version, one.basis) == (entry.version, entry.basis))


def table_cell(runtime: str, architecture: str, kind: str) -> str:
    saved = look_up(runtime, "checkpoint", architecture, kind, SAVED_KEYS)
    exported = look_up(runtime, "export", architecture, kind, SAVED_KEYS)
    words = [verdict_word(saved)] if saved else []
    if exported is not None and (saved is None or saved.verdict != exported.verdict):
        words.append(f"export: {verdict_word(exported)}")
    return ", ".join(words) or "-"


def verdict_word(entry: Entry) -> str:
    return WORDS[entry.verdict] + (" (source)" if entry.basis == "source" and entry.verdict != "untried" else "")
