"""Several processes measure what one does, to the last digit, and a killed one loses nothing that was kept."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from evaluated import STORY

ROOT = Path(__file__).parent.parent
ALONE = {key: value for key, value in os.environ.items() if key not in ("WORLD_SIZE", "RANK", "LOCAL_RANK")}
ENVIRONMENT = {**ALONE, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
SCHEMES = "yarn,self_extend,alibi"


def command(processes: int, out: Path, text: Path, *more: str) -> list[str]:
    launch = ["-m", "hf_posenc"]
    if processes > 1:
        config = ROOT / "recipes" / "accelerate" / "cpu.yaml"
        given = ["--config_file", str(config), "--num_processes", str(processes), "--main_process_port", "0"]
        launch = ["-m", "accelerate.commands.launch", *given, "-m", "hf_posenc"]
    asked = ["--target-length", "1k", "--lengths", "384,768", "--tasks", "perplexity,shift,passkey"]
    sizes = ["--windows", "5", "--trials", "2", "--depths", "0,0.5,1", "--device", "cpu"]
    files = ["--text", str(text), "--out", str(out)]
    return [sys.executable, *launch, "compare", "tiny", "--schemes", SCHEMES, *asked, *sizes, *files, *more]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "story.txt"
    path.write_text(STORY * 3)
    return path


@pytest.fixture(scope="module")
def alone(text):
    out = text.parent / "one.jsonl"
    done = subprocess.run(command(1, out, text), env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "Measuring on cpu, threads of each: 1." in done.stderr
    return out


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_two_processes_write_what_one_does(alone, text, tmp_path):
    out, page = tmp_path / "two.jsonl", tmp_path / "rows.json"
    typed = command(2, out, text, "--json", str(page))
    done = subprocess.run(typed, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "2 processes on cpu" in done.stderr and done.stdout.count("Short-context tax") == 1
    assert out.read_bytes() == alone.read_bytes()
    kept = [row for line in alone.read_text().splitlines()[1:] for row in json.loads(line)["rows"]]
    assert len(json.loads(page.read_text())) == len(kept)


@pytest.mark.parametrize("victims", ["worker", "all"])
def test_a_killed_run_goes_on_with_another_number_of_processes(alone, text, tmp_path, victims):
    out = tmp_path / "killed.jsonl"
    launched = subprocess.Popen(command(2, out, text), env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 200
    while lines(out) < 4 and launched.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert launched.poll() is None and lines(out) >= 4, "it should be killed in the middle"
    family = psutil.Process(launched.pid).children(recursive=True)
    workers = [p for p in family if p.environ().get("LOCAL_RANK")]
    assert len(workers) == 2
    chosen = [p for p in workers if victims == "all" or p.environ()["LOCAL_RANK"] == "1"]
    for process in chosen:
        os.kill(process.pid, signal.SIGKILL)
    assert launched.wait(timeout=120) != 0
    psutil.wait_procs(workers, timeout=60)
    before = out.read_bytes()
    assert 4 <= lines(out) < lines(alone)
    assert alone.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    done = subprocess.run(command(1, out, text), env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert out.read_bytes() == alone.read_bytes()
