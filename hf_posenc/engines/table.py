"""Reads, looks up and updates `runtimes.json`: which runtime computes which kind of positions for which model type.

The file is a list of entries, one per line, with these fields:

    runtime       one of RUNTIMES
    way           "checkpoint": the saved folder, given to the runtime or to its own converter
                  "export":     the result of `hf-posenc export --to ...`
    architecture  a `model_type` of transformers; "*" for all types without an entry of their own
    kind          one of `kinds.KINDS`, as `kind_of_rope` finds it in the config; "*" for all other kinds
    given         keys that config.json must have for the entry to hold, such as "rope_theta" (at the top level, as
                  older transformers wrote it) or "rope_parameters.short_mscale", or the scheme of a patch, as
                  "posenc.scheme=alibi"; left out if there are none
    verdict       "right", "refuses", "wrong" or "untried"
    basis         "measured", or "source": read in the runtime's code and not run
    version       of the runtime, and of its converter
    date          of the measurement, such as 2026-11-16
    figure        the largest measured difference of a log-probability or logit; left out if there is none
    note          a short remark; left out if there is none

`record_entries(entries)` adds new measurements. They replace entries for the same cell; the others stay:

    python -c 'from hf_posenc.engines.table import Entry, record_entries; record_entries([Entry("vllm", ...)])'

A cell without an entry is untried. A test checks every entry against this description.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Set
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..errors import PosencError
from .kinds import KINDS

FILE = "runtimes.json"
ANY = "*"
RUNTIMES = {
    "transformers": "transformers",
    "llama.cpp": "llama.cpp",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "mlx": "MLX",
    "ct2": "CTranslate2",
    "onnx": "onnxruntime",
    "tei": "text-embeddings-inference",
    "tgi": "text-generation-inference",
}
"""The name of each runtime in the file and on the command line, and as its makers write it."""
WAYS = ("checkpoint", "export")
VERDICTS = {"right": "right", "refuses": "refuses", "wrong": "would be wrong", "untried": "untried"}
BASES = {"measured": "measured", "source": "by its source"}


@dataclass(frozen=True)
class Entry:
    """The verdict on one cell of the table, and how it is known."""

    runtime: str
    way: str
    architecture: str
    kind: str
    verdict: str
    basis: str
    version: str
    date: str
    given: tuple[str, ...] = ()
    figure: float | None = None
    note: str = ""

    @property
    def cell(self) -> tuple[str, str, str, str, tuple[str, ...]]:
        return self.runtime, self.way, self.architecture, self.kind, self.given

    def __str__(self) -> str:
        """As `describe` prints it: right (measured, 0.32.0)."""
        if self.verdict == "untried":
            return VERDICTS["untried"]
        said = f"{VERDICTS[self.verdict]} ({', '.join(filter(None, (BASES[self.basis], self.version)))})"
        return f"{said}: {self.note}" if self.note else said


@cache
def entries() -> tuple[Entry, ...]:
    """The whole table."""
    return parse_entries(files(__package__).joinpath(FILE).read_text(encoding="utf-8"))


def parse_entries(text: str) -> tuple[Entry, ...]:
    """Entries from JSON; raises if a field has an unknown value."""
    found = tuple(Entry(**{**row, "given": tuple(row.get("given", ()))}) for row in json.loads(text))
    for entry in found:
        words = (
            (entry.runtime, RUNTIMES),
            (entry.way, WAYS),
            (entry.kind, (*KINDS, ANY)),
            (entry.verdict, VERDICTS),
            (entry.basis, BASES),
        )
        for word, known in words:
            if word not in known:
                raise PosencError(f"{FILE} has the unknown value {word!r} in {entry.cell}. Known: {', '.join(known)}.")
    return found


def record_entries(
    new: Iterable[Entry], file: Path | None = None, instead_of: Set[tuple[str, str, str]] = frozenset()
) -> tuple[Entry, ...]:
    """Write measurements to the file, in place of its entries for the same cells. `file` defaults to the package's.

    `instead_of`: runtime, way and model type whose older measurements are all removed. A new entry without a note
    keeps the old one if the verdict is the same.
    """
    place = file or Path(str(files(__package__).joinpath(FILE)))
    old = {entry.cell: entry for entry in parse_entries(place.read_text(encoding="utf-8"))}
    cells = {
        cell: entry
        for cell, entry in old.items()
        if (entry.runtime, entry.way, entry.architecture) not in instead_of or entry.basis != "measured"
    }
    for entry in new:
        before = old.get(entry.cell)
        kept = before.note if before is not None and before.verdict == entry.verdict and not entry.note else entry.note
        cells[entry.cell] = dataclasses.replace(entry, note=kept)
    rows = [json.dumps(_row(cells[cell])) for cell in sorted(cells)]
    text = "[\n" + ",\n".join(rows) + "\n]\n"
    found = parse_entries(text)
    place.write_text(text, encoding="utf-8")
    entries.cache_clear()
    return found


def _row(entry: Entry) -> dict[str, Any]:
    return {key: value for key, value in dataclasses.asdict(entry).items() if value not in ((), None, "")}


def look_up(runtime: str, way: str, architecture: str, kind: str, keys: Set[str] = frozenset()) -> Entry | None:
    """The most specific entry for a cell; None if there is none. `keys` are `kinds.keys_of` the config."""
    fitting = [
        entry
        for entry in entries()
        if (entry.runtime, entry.way) == (runtime, way)
        and entry.architecture in (architecture, ANY)
        and entry.kind in (kind, ANY)
        and set(entry.given) <= keys
    ]
    return max(fitting, key=lambda e: (e.architecture != ANY, e.kind != ANY, len(e.given)), default=None)


def runtime_lines(architecture: str, kind: str, keys: Set[str] = frozenset()) -> dict[str, str]:
    """For each runtime other than transformers, a line that says what it does with a checkpoint and its export."""
    return {
        runtime: _runtime_line(runtime, architecture, kind, keys) for runtime in RUNTIMES if runtime != "transformers"
    }


def _runtime_line(runtime: str, architecture: str, kind: str, keys: Set[str]) -> str:
    saved = look_up(runtime, "checkpoint", architecture, kind, keys)
    exported = look_up(runtime, "export", architecture, kind, keys)
    if exported is None:
        return str(saved or "untried")
    if saved is None or (exported.verdict, saved.verdict) == ("refuses", "refuses"):
        return f"by `hf-posenc export`: {exported}"
    return f"by `hf-posenc export`: {exported}; from this folder: {saved}"
