"""Single measurements, each saved as soon as it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from ...extras import require
from ...patching.describe import describe
from ...patching.patch_state import is_patched, unwrap_model
from ..measures.perplexity import Progress
from ..measures.rows import Row
from .results import Results
from .tax import UNPATCHED


@dataclass(frozen=True)
class Job:
    """One measurement, of about so many tokens."""

    key: str
    length: int
    tokens: int
    run: Callable[[Any, str, Progress], list[Row]]


def scheme_of(model: Any) -> str:
    return describe(model).scheme if is_patched(unwrap_model(model)) else UNPATCHED


def perform(model: Any, scheme: str, jobs: Sequence[Job], results: Results, bar: Progress) -> list[Row]:
    """The rows of every job: those saved before, and those measured now."""
    rows = []
    for job in jobs:
        key = f"{scheme}/{job.key}"
        if key not in results.done:
            results.add(key, job.run(model, scheme, bar))
        rows += results.done[key]
    return rows


@contextmanager
def progress_bar(jobs: Sequence[tuple[str, Job]], results: Results, quiet: bool) -> Iterator[Any]:
    """A progress bar over all tokens that are still to be read."""
    left = sum(job.tokens for scheme, job in jobs if f"{scheme}/{job.key}" not in results.done)
    if quiet or not left:
        yield SimpleNamespace(update=lambda tokens: None)
        return
    tqdm = require("tqdm", "cli", "A progress bar").tqdm
    with tqdm(total=left, unit="tok", unit_scale=True, smoothing=0.1) as bar:
        yield bar


def unique_jobs(jobs: Sequence[Job]) -> list[Job]:
    return list({job.key: job for job in jobs}.values())


def keep(results: Results, key: str, rows: list[Row]) -> list[Row]:
    if rows and key not in results.done:
        results.add(key, rows)
    return rows
