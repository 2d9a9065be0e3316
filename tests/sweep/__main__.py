"""Every text model type that transformers knows, judged in processes of their own: `make sweep`.

`python tests/sweep TYPE ...` judges some and prints; without names it judges all and writes the package's table.
"""

from __future__ import annotations

import json
import platform
import select
import subprocess
import sys
import threading
from pathlib import Path
from queue import Empty, Queue

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
TABLE = HERE.parent.parent / "hf_posenc" / "families" / "verified.json"
LIMIT = 150
"""Seconds for one model type: one that hangs must not stop the sweep."""


class Worker:
    """A process that judges one model type after another."""

    def __init__(self) -> None:
        command = [sys.executable, str(HERE), "--worker"]
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


def work() -> None:
    from laws import judged

    out, sys.stdout = sys.stdout, sys.stderr  # what models print is not a verdict
    for line in sys.stdin:
        print(json.dumps(judged(line.strip())), file=out, flush=True)


def sweep(model_types: list[str], workers: int = 2) -> dict[str, dict[str, str]]:
    queue: Queue[str] = Queue()
    for name in model_types:
        queue.put(name)
    found: dict[str, dict[str, str]] = {}

    def run() -> None:
        worker = Worker()
        while True:
            try:
                name = queue.get_nowait()
            except Empty:
                worker.process.kill()
                return
            verdicts = worker.judge(name)
            if verdicts is None:
                verdicts, worker = {"*": f"cannot be judged here: the process hung for {LIMIT} s or died"}, Worker()
            found[name] = verdicts
            print(f"{name:<24}" + "  ".join(f"{k}: {v[:90]}" for k, v in verdicts.items()), flush=True)

    threads = [threading.Thread(target=run) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {name: found[name] for name in model_types}


def main() -> None:
    if sys.argv[1:] == ["--worker"]:
        return work()
    import torch
    import transformers
    from shrink import CAUSAL, MASKED

    names = sys.argv[1:] or sorted({*CAUSAL, *MASKED})
    found = sweep(names)
    if not sys.argv[1:]:
        about = {"transformers": transformers.__version__, "torch": torch.__version__, "machine": platform.machine()}
        TABLE.write_text(json.dumps({"about": about, "families": found}, indent=1) + "\n", encoding="utf-8")
    verdicts = [v for schemes in found.values() for v in schemes.values()]
    works = sum(any(not v.startswith(("refused", "wrong", "cannot")) for v in s.values()) for s in found.values())
    wrong = [name for name, schemes in found.items() if any(v.startswith("wrong") for v in schemes.values())]
    print(f"{len(found)} model types, {works} work; {len(verdicts)} verdicts; wrong: {', '.join(wrong) or 'none'}")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
