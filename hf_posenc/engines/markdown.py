"""The table of runtimes as Markdown for the documentation. `make docs` calls it."""

from __future__ import annotations

from .kinds import KINDS, SCHEME, is_scheme
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
    schemes = _scheme_lines(known)
    versions = sorted({f"{entry.version} ({entry.basis}, {_last_date(known, entry)})" for entry in known})
    return "\n".join([*rows, "", *schemes, f"{RUNTIMES[runtime]}: {'; '.join(versions) or 'nothing is known yet'}."])


def _scheme_lines(known: list[Entry]) -> list[str]:
    """What is known of single schemes of a kind, for each model type, as a list."""
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for entry in known:
        for scheme in (key.removeprefix(SCHEME) for key in filter(is_scheme, entry.given)):
            verdicts = found.setdefault((entry.kind, entry.architecture), {})
            verdicts.setdefault(entry.verdict, []).append(f"`{scheme}`")
    lines = [
        f"- {kind}, {architecture}: "
        + "; ".join(
            f"{WORDS[verdict]} {', '.join(sorted(verdicts[verdict]))}" for verdict in WORDS if verdict in verdicts
        )
        for (kind, architecture), verdicts in sorted(found.items())
    ]
    return [*lines, ""] if lines else []


def _last_date(known: list[Entry], entry: Entry) -> str:
    """The latest date of the entries about this version."""
    return max(one.date for one in known if (one.version, one.basis) == (entry.version, entry.basis))


def table_cell(runtime: str, architecture: str, kind: str) -> str:
    saved = look_up(runtime, "checkpoint", architecture, kind, SAVED_KEYS)
    exported = look_up(runtime, "export", architecture, kind, SAVED_KEYS)
    words = [verdict_word(saved)] if saved else []
    if exported is not None and (saved is None or saved.verdict != exported.verdict):
        words.append(f"export: {verdict_word(exported)}")
    return ", ".join(words) or _by_scheme(runtime, architecture, kind) or "-"


def _by_scheme(runtime: str, architecture: str, kind: str) -> str:
    """Where only single schemes of a kind are known: how many of them are right."""
    cell = runtime, architecture, kind
    verdicts = [
        entry.verdict
        for entry in entries()
        if (entry.runtime, entry.architecture, entry.kind) == cell and any(map(is_scheme, entry.given))
    ]
    return f"export: right for {verdicts.count('right')} of {len(verdicts)} schemes" if verdicts else ""


def verdict_word(entry: Entry) -> str:
    return WORDS[entry.verdict] + (" (source)" if entry.basis == "source" and entry.verdict != "untried" else "")
