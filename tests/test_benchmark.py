"""The benchmark runs; what it measures is for its reader to judge, not for a test with a time limit."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "benchmark.py"


def test_a_group_of_rows(tmp_path):
    command = [sys.executable, str(SCRIPT), "--only", "patching", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "benchmark.json").read_text())
    assert report["conditions"]["torch"]
    assert [row["unit"] for row in report["rows"]] == ["s", "MB", "s", "MB"]
    assert all("True" in row["note"] for row in report["rows"] if row["unit"] == "s")  # no weight was copied
    assert (tmp_path / "benchmark.png").stat().st_size > 1000
