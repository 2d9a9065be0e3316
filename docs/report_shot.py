"""The README's shot of the report page, from the lines behind docs/study.md; by hand, since it needs Chromium."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from studies import read_rows

from hf_posenc.evaluation.measures.rows import Row
from hf_posenc.evaluation.report import write

HERE = Path(__file__).parent
SIZE = (1100, 730)
ABOUT = {
    "title": "SmolLM2-135M-Instruct past its length",
    "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "text": "three novels",
    "trained_length": 8192,
}


def rows() -> list[Row]:
    """The loss by position of every scheme in windows of 16384 tokens."""
    found = [row for line in read_rows("study-smollm2") for row in line.get("rows", ())]
    return [Row(**row) for row in found if row["protocol"] == "whole"]


def shoot(target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        write(rows(), page, ABOUT)
        window = "--window-size={},{}".format(*SIZE)
        command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", window]
        subprocess.run([*command, f"--screenshot={target}", page.as_uri()], check=True, capture_output=True)


if __name__ == "__main__":
    shoot(HERE / "report.png")
