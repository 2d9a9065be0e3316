"""One model under several schemes in turn, on the same text, the same windows and the same code."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from ..patch import is_patched, patch_model, unpatch_model
from ..registry import PosencError
from ..schemes import SCHEMES
from .estimates import separated
from .results import Results, fingerprint
from .rows import Row
from .runs import Job, Material, Options, kept, perform, prepared, progress_bar, reach, trained_length, unique
from .tax import UNPATCHED, tax_rows
from .texts import Document

CHUNKED = "chunked"
"""No scheme: an encoder reads a long text in pieces, and the mean of their embeddings stands for it."""


@dataclass(frozen=True)
class Entry:
    """A scheme with the options that it is given, under the name that was asked for."""

    label: str
    scheme: str
    options: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Which places a scheme may hold at a length: after those that are clearly better, before those clearly worse."""

    task: str
    protocol: str
    length: int
    scheme: str
    rank: int
    lowest: int
    value: float
    stderr: float | None
    tied: tuple[str, ...]
    """Schemes that the error bars do not tell from this one."""


def parsed_schemes(text: str) -> list[Entry]:
    """`none,yarn:factor=4,beta_fast=16,ntk`: options follow a colon, values are JSON or text."""
    entries: list[Entry] = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, colon, option = part.partition(":")
        if "=" in name and entries:  # another option of the scheme before
            name, option = "", part
        if name:
            if name != CHUNKED:
                SCHEMES[name]
            entries.append(Entry(part, name, {}))
        if option or colon:
            key, equals, value = option.partition("=")
            if not equals or not entries or entries[-1].scheme == CHUNKED:
                raise PosencError(f"A scheme's option is name=value, as in yarn:factor=4,beta_fast=16; got {part!r}.")
            entry = entries.pop()
            label = entry.label if name else f"{entry.label},{option}"
            entries.append(Entry(label, entry.scheme, {**entry.options, key: _value(value)}))
    labels = [entry.label for entry in entries]
    if not entries or len(set(labels)) < len(labels):
        raise PosencError(f"Name each scheme to compare once, as in none,linear,yarn; got {text!r}.")
    return entries


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


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
) -> list[Row]:
    """The rows of the unpatched model and of every scheme, and their short-context taxes. The model ends as it came.

    A scheme reaches for `target_length` unless its own options say otherwise.
    """
    if options is not None and options.embeds:
        from .encoders import compare_encoders  # which is made of parts of this

        return compare_encoders(
            model, tokenizer, schemes, documents, target_length=target_length, options=options, out=out, force=force,
            quiet=quiet,
        )  # fmt: skip
    if hasattr(model, "peft_config") or is_patched(model):
        raise PosencError("compare starts from an unpatched model without adapters; this one is patched or adapted.")
    model.eval()
    entries = parsed_schemes(schemes) if isinstance(schemes, str) else list(schemes)
    refuse_chunked(entries)
    trained = trained_length(model)
    options = options or Options(lengths=doublings(trained, target_length))
    material = prepared(model, Material(tokenizer, documents, options, trained, bool(documents)), force)
    for entry in entries:  # before an hour is spent on the first of them
        patched(model, entry, target_length)
        unpatch_model(model)
    jobs = unique([*material.jobs(), *material.tax_jobs()])
    identity = {**options.identity(), "schemes": [entry.label for entry in entries], "target_length": target_length}
    results = Results(out, fingerprint(model, tokenizer, documents, identity))
    names = [UNPATCHED, *(entry.label for entry in entries)]
    with progress_bar([(name, job) for name in names for job in jobs], results, quiet) as bar:
        rows = perform(model, UNPATCHED, within_reach(model, UNPATCHED, jobs), results, bar.update)
        for entry in entries:
            patched(model, entry, target_length)
            try:
                rows += perform(model, entry.label, within_reach(model, entry.label, jobs), results, bar.update)
            finally:
                unpatch_model(model)
            taxes = tax_rows([r for r in rows if r.scheme in (UNPATCHED, entry.label)], trained)
            rows += kept(results, f"{entry.label}/tax", taxes)
    return rows


def refuse_chunked(entries: Sequence[Entry]) -> None:
    if any(entry.scheme == CHUNKED for entry in entries):
        raise PosencError(
            f"{CHUNKED!r} averages embeddings of pieces of a text, and these tasks are for decoders: take "
            "--tasks embed_passkey or embed_needle, or leave it out."
        )


def patched(model: Any, entry: Entry, target_length: int) -> None:
    """Patch the model with a scheme; random parts are the same every time."""
    given = dict(entry.options)
    if not {"target_length", "factor"} & set(given) or entry.scheme == "dynamic_ntk":
        given.setdefault("target_length", target_length)  # dynamic_ntk's factor is head-room, not a length
    try:
        patch_model(model, entry.scheme, existing=given.pop("existing", "extend"), **given)
    except PosencError as error:
        raise type(error)(f"{entry.label}: {error}") from None


def within_reach(model: Any, scheme: str, jobs: Sequence[Job]) -> list[Job]:
    """The jobs that the model's table is long enough for; says which are left out."""
    end = reach(model)
    found = [job for job in jobs if end is None or job.length <= end]
    left = sorted({job.length for job in jobs} - {job.length for job in found})
    if left:
        warnings.warn(f"{scheme} ends at {end} positions and is not measured at {left}.", stacklevel=3)
    return found


def standings(rows: Sequence[Row]) -> list[Standing]:
    """Schemes in order of loss, at each length; what paired error bars do not separate shares a rank."""
    groups: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        if row.metric == "loss" and "losses" in row.details:
            groups.setdefault((row.task, row.protocol, row.length), []).append(row)
    found = []
    for (task, protocol, length), group in sorted(groups.items()):
        group.sort(key=lambda row: row.value)
        pairs = len(list(combinations(group, 2))) or 1
        for row in group:
            apart = {
                other.scheme
                for other in group
                if other is not row and separated(row.details["losses"], other.details["losses"], pairs)
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
