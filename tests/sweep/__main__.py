"""Every text model type that transformers knows, judged in processes of their own: `make sweep`.

`python tests/sweep TYPE ...` judges some and prints, and fails if one cannot be judged; without names it judges all
and writes the package's table. `--register FILE` imports a file or module that registers a family or a scheme first.
"""

from __future__ import annotations

import argparse
import json
import platform
import select
import subprocess
import sys
import threading
from pathlib import Path
from queue import Empty, Queue

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
TABLE = HERE.parent.parent / "hf_posenc" / "families" / "verified.json"
LIMIT = 150
"""Seconds for one model type: one that hangs must not stop the sweep."""


def is_no_verdict(verdict: str) -> bool:
    """Whether nothing was learnt: the model could not be built or judged, or no family knows its type."""
    return verdict.startswith("cannot") or "are not supported" in verdict


class Worker:
    """A process that judges one model type after another."""

    def __init__(self, registered: list[str]) -> None:
        command = [sys.executable, str(HERE), "--worker", *(f"--register={name}" for name in registered)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def judge(self, model_type: str) -> dict[str, str] | None:
        """The verdicts, or None if the process hung or died: it is gone then."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(model_type + "\n")
        self.process.stdin.flush()
        ready, _, _ = select.select([self.process.stdout], [], [], LIMIT)
        line = self.process.stdout.readline() if ready else ""
        if line:
            return json.loads(line)
        self.process.kill()
        self.process.wait()
        return None


def work(registered: list[str]) -> None:
    from laws import judged
    from registering import register_from

    out, sys.stdout = sys.stdout, sys.stderr  # what models print is not a verdict
    for name in registered:
        register_from(name)
    for line in sys.stdin:
        print(json.dumps(judged(line.strip())), file=out, flush=True)


def sweep(model_types: list[str], registered: list[str], workers: int = 2) -> dict[str, dict[str, str]]:
    queue: Queue[str] = Queue()
    for name in model_types:
        queue.put(name)
    found: dict[str, dict[str, str]] = {}

    def run() -> None:
        worker = Worker(registered)
        while True:
            try:
                name = queue.get_nowait()
            except Empty:
                worker.process.kill()
                return
            verdicts = worker.judge(name)
            if verdicts is None:
                verdicts = {"*": f"cannot be judged here: the process hung for {LIMIT} s or died"}
                worker = Worker(registered)
            found[name] = verdicts
            print(f"{name:<24}" + "  ".join(f"{k}: {v[:90]}" for k, v in verdicts.items()), flush=True)

    threads = [threading.Thread(target=run) for _ in range(min(workers, len(model_types)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {name: found[name] for name in model_types}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python tests/sweep", description=__doc__)
    parser.add_argument("types", nargs="*", metavar="TYPE")
    parser.add_argument("--register", action="append", default=[], metavar="FILE")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        return work(asked.register)
    from registering import register_from

    for name in asked.register:
        register_from(name)  # here as well: a mistake in it is told at once
    judge(asked.types, asked.register)


def judge(named: list[str], registered: list[str]) -> None:
    """Judge these types and print, or all of them and write the table; exit with 1 if something is wrong."""
    import torch
    import transformers
    from shrink import CAUSAL, MASKED

    found = sweep(named or sorted({*CAUSAL, *MASKED}), registered)
    if not named:
        about = {"transformers": transformers.__version__, "torch": torch.__version__, "machine": platform.machine()}
        TABLE.write_text(json.dumps({"about": about, "families": found}, indent=1) + "\n", encoding="utf-8")
    verdicts = [v for schemes in found.values() for v in schemes.values()]
    works = sum(any(not v.startswith(("refused", "wrong", "cannot")) for v in s.values()) for s in found.values())
    wrong = [name for name, schemes in found.items() if any(v.startswith("wrong") for v in schemes.values())]
    unknown = [name for name, schemes in found.items() if all(map(is_no_verdict, schemes.values()))]
    print(f"{len(found)} model types, {works} work; {len(verdicts)} verdicts; wrong: {', '.join(wrong) or 'none'}")
    if named and unknown:
        print(f"could not be judged: {', '.join(unknown)}")
    raise SystemExit(bool(wrong or (named and unknown)))


if __name__ == "__main__":
    main()
