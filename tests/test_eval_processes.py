"""Several processes measure what one does, to the last digit, and a killed one loses nothing that was kept."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest
from evaluated import STORY
from forked import command as forked_command
from forked import fork, fork_two

ROOT = Path(__file__).parent.parent
ALONE = {key: value for key, value in os.environ.items() if key not in ("WORLD_SIZE", "RANK", "LOCAL_RANK")}
ENVIRONMENT = {**ALONE, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
SCHEMES = "yarn,self_extend,alibi"


def command_line(out: Path, text: Path) -> list[str]:
    measured = ["--target-length", "1k", "--lengths", "384,768", "--tasks", "perplexity,shift,passkey"]
    sizes = ["--windows", "5", "--trials", "2", "--depths", "0,0.5,1", "--device", "cpu"]
    return ["compare", "tiny", "--schemes", SCHEMES, *measured, *sizes, "--text", str(text), "--out", str(out)]


def launch(out: Path, text: Path, *more: str) -> list[str]:
    """Two processes, as users start them."""
    config = ROOT / "recipes" / "accelerate" / "cpu.yaml"
    given = ["--config_file", str(config), "--num_processes", "2", "--main_process_port", "0", "-m", "hf_posenc"]
    return [sys.executable, "-m", "accelerate.commands.launch", *given, *command_line(out, text), *more]


def launcher(out: Path, text: Path) -> Callable[[], None]:
    """What starts the two, without the seconds that its own start takes."""

    def work() -> None:
        from accelerate.commands.launch import main

        sys.argv = launch(out, text)[2:]
        main()

    return work


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "story.txt"
    path.write_text(STORY * 3)
    return path


def measure(out: Path, text: Path, said: Path) -> BaseProcess:
    """One process that measures, without the seconds that a start takes."""
    return fork(forked_command(*command_line(out, text)), said)


@pytest.fixture(scope="module")
def alone(text):
    out, said = text.parent / "one.jsonl", text.parent / "said"
    process = measure(out, text, said)
    process.join()
    assert process.exitcode == 0, said.read_text()
    assert "Measuring on cpu, threads of each: 1." in said.read_text()
    return out


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_two_processes_write_what_one_does(alone, text, tmp_path):
    out, page = tmp_path / "two.jsonl", tmp_path / "rows.json"
    typed = launch(out, text, "--json", str(page))
    done = subprocess.run(typed, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "2 processes on cpu" in done.stderr and done.stdout.count("Short-context tax") == 1
    assert out.read_bytes() == alone.read_bytes()
    kept = [row for line in alone.read_text().splitlines()[1:] for row in json.loads(line)["rows"]]
    assert len(json.loads(page.read_text())) == len(kept)


def wait_for_the_middle(out: Path, runs: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 200
    while lines(out) < 4 and runs() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert runs() and lines(out) >= 4, "it should be killed in the middle"


def goes_on(out: Path, alone: Path, text: Path) -> None:
    """What a killed run has kept is the beginning of what one process writes, which goes on to the rest."""
    before = out.read_bytes()
    assert 4 <= lines(out) < lines(alone)
    assert alone.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    said = out.with_name("said")
    process = measure(out, text, said)
    process.join()
    assert process.exitcode == 0, said.read_text()
    assert out.read_bytes() == alone.read_bytes()


def test_a_run_whose_worker_was_killed_goes_on_with_another_number_of_processes(alone, text, tmp_path):
    out = tmp_path / "killed.jsonl"
    launched = fork(launcher(out, text), **ENVIRONMENT)
    wait_for_the_middle(out, launched.is_alive)
    family = psutil.Process(launched.pid).children(recursive=True)
    workers = {p.environ()["LOCAL_RANK"]: p for p in family if p.environ().get("LOCAL_RANK")}
    assert len(workers) == 2
    workers["1"].kill()
    launched.join(timeout=120)
    assert launched.exitcode not in (0, None)
    psutil.wait_procs(workers.values(), timeout=60)
    goes_on(out, alone, text)


def test_a_run_that_was_killed_whole_goes_on_with_another_number_of_processes(alone, text, tmp_path):
    out = tmp_path / "killed.jsonl"
    workers = fork_two(forked_command(*command_line(out, text)), tmp_path)
    wait_for_the_middle(out, lambda: all(worker.is_alive() for worker in workers))
    for worker in workers:
        worker.kill()
        worker.join()
    goes_on(out, alone, text)
