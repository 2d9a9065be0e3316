"""Run the laws on other releases of transformers: `python tools/compat.py [RELEASE ...]`, or `make compat`.

Each release gets an environment of its own in build/compat, which sees the packages of this one below its own: only
transformers and what that release wants otherwise is installed. Prints a row per release, in the form of
docs/versions.md: how many tests passed, and in how many cells (a scheme on a kind of model) all of them did.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import site
import subprocess
import sys
import time
import venv
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RELEASES = ("5.5.0", "5.14.1", "5.23.0")
"""The oldest that pyproject.toml allows, one between, and the newest."""
CHOSEN = ("tests", "-m", "core or release")


class Outcome(NamedTuple):
    passed: int
    failed: list[str]
    skipped: int
    cells: dict[tuple[str, str], bool]
    """Whether a scheme keeps all laws on a kind of model."""


def environment(release: str, folder: Path) -> Path:
    """The interpreter of an environment with this release, on top of the packages of the running one."""
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        venv.create(folder, with_pip=False)
    packages = next(folder.glob("lib/python*/site-packages"), folder / "Lib/site-packages")
    (packages / "below.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    wanted = f"transformers=={release}"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*pip, wanted], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{wanted} cannot be installed:\n{done.stderr}")
    return python


def known_cells() -> set[tuple[str, str]]:
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from cells import CELLS

    return set(CELLS)


def run(python: Path, folder: Path, chosen: Sequence[str], workers: int) -> Path:
    """Run the tests in an environment, in processes of their own; where they are reported."""
    report = folder / "tests.xml"
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *chosen]
    if workers > 1:
        command += ["-n", str(workers), "--dist", "worksteal"]
    surroundings = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    report.unlink(missing_ok=True)
    with (folder / "tests.log").open("w") as log:
        subprocess.run(command, cwd=ROOT, env=surroundings, stdout=log, stderr=subprocess.STDOUT)
    if not report.exists():
        raise SystemExit(f"No test ran: see {log.name}")
    return report


def read(report: Path, known: set[tuple[str, str]]) -> Outcome:
    """`known`: the cells, which tests carry the names of."""
    passed, skipped, failed, cells = 0, 0, [], {}
    for case in ET.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        bad = case.find("failure") is not None or case.find("error") is not None
        missed = case.find("skipped") is not None
        passed += not (bad or missed)
        skipped += missed
        failed += [name] if bad else []
        words = re.split(r"[\[\]-]", name)
        for cell in set(pairwise(words)) & known:
            cells[cell] = cells.get(cell, True) and not bad
    return Outcome(passed, failed, skipped, cells)


def versions(python: Path) -> str:
    """What stands in the environment, as it says itself."""
    code = "import transformers, tokenizers, huggingface_hub as h; print(transformers.__version__, "
    code += "tokenizers.__version__, h.__version__)"
    return subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", nargs="*", default=RELEASES, metavar="RELEASE")
    parser.add_argument("--tests", type=shlex.split, default=CHOSEN, help="what pytest is to run, in one string")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "compat")
    asked = parser.parse_args()
    print("| transformers | tokenizers | huggingface_hub | cells | tests | seconds |\n|---|---|---|---|---|---|")
    broken: list[str] = []
    known = known_cells()
    for release in asked.releases:
        folder = asked.folder / f"transformers-{release}"
        python, begun = environment(release, folder), time.monotonic()
        found = versions(python).split()
        outcome = read(run(python, folder, asked.tests, asked.workers), known)
        whole, total = sum(outcome.cells.values()), outcome.passed + len(outcome.failed)
        cells, tests = f"{whole} of {len(outcome.cells)}", f"{outcome.passed} of {total}"
        print(f"| {' | '.join(found)} | {cells} | {tests} | {time.monotonic() - begun:.0f} |", flush=True)
        broken += [f"{release}: {name}" for name in outcome.failed]
    for line in broken:
        print(line, file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
