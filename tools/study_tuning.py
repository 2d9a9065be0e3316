"""What tuning gains in length, not in domain: the same LoRA on a patched and on an unpatched model.

    python tools/study_tuning.py MODEL --text 'novels/*.txt' --out docs/results/study-NAME-tuning.jsonl

Runs `hf-posenc train tools/study_tuning.yaml --control` for each seed in `--runs`, and goes on there if it was
stopped. A line is written for each seed and figure; `make docs` makes the table of docs/study.md from these lines.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RECIPE = Path(__file__).with_suffix(".yaml")


def run(model: str, text: str, seed: int, folder: Path) -> None:
    """Tune with one seed, and its control, unless that was done; the first also measures what there was before."""
    if (folder / "metrics.json").exists():
        return
    told = [f"--model.path={model}", f"--data.path={text}", f"--train.seed={seed}", f"--output={folder}"]
    told += [f"--measure.before={str(seed == 0).lower()}"]
    command = [sys.executable, "-m", "hf_posenc", "train", str(RECIPE), "--control", *told]
    subprocess.run([*command, *(["--resume"] if folder.exists() else [])], check=True)


def lines(seed: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Losses of a run, for each window of text."""
    for row in json.loads((folder / "metrics.json").read_text(encoding="utf-8"))["figures"]:
        if row["metric"] == "loss":
            kept = {key: row[key] for key in ("task", "protocol", "length", "value", "stderr", "n")}
            yield {"scheme": row["scheme"], "seed": seed, **kept, "losses": row["details"]["losses"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=Path, default=Path("runs/study_tuning"))
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    found = []
    for seed in range(asked.seeds):
        folder = asked.runs / f"seed{seed}"
        run(asked.model, asked.text, seed, folder)
        found += list(lines(seed, folder))
        asked.out.write_text("".join(json.dumps(line) + "\n" for line in found), encoding="utf-8")


if __name__ == "__main__":
    main()
