"""Processes of their own without the seconds that a start takes: forked, with all that is imported there already.

For what is about a process: its death, its memory, others beside it. How a command starts is for tests that start one.
"""

import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
FORK = multiprocessing.get_context("fork")


def fork(work: Callable[[], object], said: Path | str = os.devnull, **environment: str) -> BaseProcess:
    """A process that does this and ends; what it says goes to a file."""
    process = FORK.Process(target=_work, args=(work, said, environment))
    process.start()
    return process


def _work(work: Callable[[], object], said: Path | str, environment: dict[str, str]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which is ignored in what runs in the background
    os.environ.update(environment)
    if "accelerate.state" in sys.modules:  # which knows what was launched before, in the process forked
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)
    with open(said, "w", encoding="utf-8", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = file
        work()


def fork_two(work: Callable[[], object], said: Path) -> list[BaseProcess]:
    """Two processes of one run, which know of each other as those of a launcher do; each says to `said`/RANK."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        run = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    return [fork(work, said / rank, **run, RANK=rank, LOCAL_RANK=rank) for rank in ("0", "1")]


def command(*words: object) -> Callable[[], None]:
    """What `hf-posenc` does with these words."""

    def run() -> None:
        from hf_posenc.__main__ import main

        sys.argv = ["hf-posenc", *map(str, words)]
        main()

    return run


def result_of(work: Callable[[], T]) -> T:
    """What `work` returns in a process of its own."""
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=lambda: sender.send(work()))
    process.start()
    sender.close()
    try:
        found: T = receiver.recv()
    finally:
        process.join()
    return found


def megabytes(field: str) -> float:
    """What Linux says of this process: `VmRSS`, what it holds of memory, or `VmHWM`, the most it has held so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def peak_of(work: Callable[[], object]) -> float:
    """How many megabytes this process takes for a while to do this, beside what it holds already."""
    Path("/proc/self/clear_refs").write_text("5")  # a child starts with its parent's peak: forget it
    before = megabytes("VmRSS")
    work()
    return megabytes("VmHWM") - before
