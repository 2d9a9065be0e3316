"""The benchmark runs; what it measures is for its reader to judge, not for a test with a time limit."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "benchmarks" / "benchmark.py"


def test_a_group_of_rows(tmp_path):
    command = [sys.executable, str(SCRIPT), "--only", "patching", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "benchmark.json").read_text())
    assert report["conditions"]["torch"]
    assert [row["unit"] for row in report["rows"]] == ["s", "MB", "s", "MB"]
    assert all("True" in row["note"] for row in report["rows"] if row["unit"] == "s")  # no weight was copied
    assert (tmp_path / "benchmark.png").stat().st_size > 1000


def test_the_table_of_costs_is_what_was_measured(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    tables = importlib.import_module("tables")
    costs = (ROOT / "docs" / "costs.md").read_text(encoding="utf-8")
    said = costs.partition("<!-- speed -->\n")[2].partition("\n<!-- /speed -->")[0]
    assert said == tables.speed_table(ROOT / "docs" / "results"), "make docs writes it anew"
    assert "`dynamic_ntk` / `longrope`" in said and "training 2048" in said


def test_rows_of_a_table_share_a_goal(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    row = {"what": "decode", "length": 8, "variant": "", "unit": "time", "goal": 1.2, "before": None}
    rows = [{**row, "scheme": "a", "measured": 1.25}, {**row, "scheme": "b", "measured": 1.1, "before": 3.0}]
    conditions = {"device": "cpu", "machine": "m", "threads": 2, "clock": "wall", "torch": "2", "transformers": "5"}
    groups = {"decode": {"conditions": conditions, "rows": rows}}
    (tmp_path / "speed-cpu.json").write_text(json.dumps({"groups": groups}))
    lines = importlib.import_module("tables").speed_table(tmp_path).splitlines()
    assert lines[0] == "cpu (m, 2 threads), torch 2, transformers 5:"
    assert lines[-1] == "| decode 8: time | `a` / `b` | - / 3.00 | 1.20 | **1.25** / 1.10 |"


def test_groups_that_were_not_run_stay_in_the_results(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    speed, out = importlib.import_module("speed"), tmp_path / "speed.json"
    out.write_text(speed.merged_results(out, {"clock": "cpu"}, {"decode": [{"measured": 1}], "prefill": []}))
    out.write_text(speed.merged_results(out, {"clock": "wall"}, {"prefill": [{"measured": 2}]}))
    groups = json.loads(out.read_text())["groups"]
    assert groups["decode"] == {"conditions": {"clock": "cpu"}, "rows": [{"measured": 1}]}
    assert groups["prefill"] == {"conditions": {"clock": "wall"}, "rows": [{"measured": 2}]}


def test_candidates_take_turns(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    calls, ticks = [], iter(range(100))
    bench = importlib.import_module("speed").Bench("cpu", 2, lambda: next(ticks))
    found = bench.times({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")})
    assert calls == ["a", "b"] * 3 and found == {"a": 1000, "b": 1000}
