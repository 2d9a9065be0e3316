"""Many runs: those that a file lacks, side by side without more threads than cores."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .page import page
from .runs import Job, key_of, read_results, run, settings_of


def jobs_of(tasks: list[str], schemes: list[str], seeds: int, changed: dict[str, Any]) -> list[Job]:
    """Each task with each seed and scheme, in the task's own settings but for what is changed."""
    return [
        Job(t, scheme, seed, settings_of(t, changed)) for t in tasks for seed in range(seeds) for scheme in schemes
    ]


def missing_jobs(jobs: list[Job], done: list[dict[str, Any]]) -> list[Job]:
    known = {key_of(result) for result in done}
    return [job for job in jobs if job.key not in known]


def _start(threads: int) -> None:
    torch.set_num_threads(threads)


def results_of(jobs: list[Job], processes: int) -> Iterator[dict[str, Any]]:
    """Run jobs, and yield each result when it is there. The processes share the cores evenly."""
    threads = max((os.cpu_count() or 1) // processes, 1)
    if processes == 1:
        yield from map(run, jobs)
        return
    # Not forked: torch's threads do not survive that.
    with multiprocessing.get_context("spawn").Pool(processes, _start, (threads,), maxtasksperchild=8) as pool:
        yield from pool.imap_unordered(run, jobs)


def bench(jobs: list[Job], out: Path, processes: int) -> Path:
    """Run what `out`/results.jsonl lacks, and write the page anew after each result; the path of the page."""
    out.mkdir(parents=True, exist_ok=True)
    file, written = out / "results.jsonl", out / "index.html"
    results = read_results(file)
    todo = missing_jobs(jobs, results)
    print(f"{len(jobs) - len(todo)} of {len(jobs)} runs are in {file}.", flush=True)
    file.write_text("".join(json.dumps(result) + "\n" for result in results), encoding="utf-8")
    for result in results_of(todo, min(processes, max(len(todo), 1))):
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(result) + "\n")
        results.append(result)
        written.write_text(page(results), encoding="utf-8")
        found = ", ".join(f"{length}: {value:.2f}" for length, value in result["by_length"].items())
        print(f"{result['task']} {result['scheme']} seed {result['seed']}: {found}", flush=True)
    written.write_text(page(results), encoding="utf-8")
    return written
