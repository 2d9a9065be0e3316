"""Tables of docs/study.md, from the lines that its commands wrote into docs/results."""

import json
import math
import statistics
from pathlib import Path
from typing import Any

from hf_posenc.evaluation.measures.retrieval import accuracy

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]
LENGTHS = (4096, 8192, 12288, 16384)
TAXED = (4096, 8192)
TUNED, CONTROL = "yarn, tuned", "unpatched, tuned"


def lines_of(name: str, results: Path = RESULTS) -> list[Row]:
    return [json.loads(line) for line in (results / name).read_text(encoding="utf-8").splitlines()]


def measured(name: str, results: Path = RESULTS) -> list[Row]:
    """The rows of a file that `hf-posenc compare --out` wrote."""
    return [row for line in lines_of(name, results) for row in line.get("rows", [])]


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows])


def told(row: Row, digits: int) -> str:
    return f"{row['value']:.{digits}f} ± {row['stderr']:.{digits}f}"


def named(scheme: str) -> str:
    return scheme if scheme in ("unpatched", "chunked") else f"`{scheme}`"


def losses_table(results: Path = RESULTS) -> str:
    """The loss of the 512 tokens before each length, and the tax at and below the trained one."""
    rows = measured("study-smollm2-loss.jsonl", results)
    places = [row for row in rows if row["task"] == "loss_by_position"]
    by_place = {(row["scheme"], row["length"] // 512 * 512): row for row in places}  # stretches of 512 tokens
    taxes = {(row["scheme"], row["length"]): row for row in rows if row["task"] == "tax" and row["metric"] == "loss"}
    body = []
    for scheme in dict.fromkeys(row["scheme"] for row in rows):
        losses = [told(by_place[scheme, length], 2) for length in LENGTHS]
        tax = [told(taxes[scheme, length], 3) if (scheme, length) in taxes else "" for length in TAXED]
        body.append([named(scheme), *losses, *tax])
    return table(["loss before", *map(str, LENGTHS), *(f"tax at {length}" for length in TAXED)], body)


def passkeys_table(results: Path = RESULTS) -> str:
    """Keys found, over the haystacks that every scheme has read."""
    rows = [row for row in lines_of("study-smollm2-keys.jsonl", results) if row["arm"] == "passkeys"]
    schemes = list(dict.fromkeys(row["scheme"] for row in rows))
    places = sorted({(row["length"], row["number"]) for row in rows})
    full = [p for p in places if sum((row["length"], row["number"]) == p for row in rows) == len(schemes)]
    lengths = sorted({length for length, _ in full})
    body = []
    for scheme in schemes:
        cells = []
        for how in ("likelihood", "generation"):
            for length in lengths:
                own = [r for r in rows if r["scheme"] == scheme and r["length"] == length]
                hits = [float(x) for r in own if (length, r["number"]) in full for x in r["value"][how]]
                value, error = accuracy(hits)
                cells.append(f"{value:.2f} ± {error:.2f} ({len(hits)})")
        body.append([named(scheme), *cells])
    ways = ("told from four others", "written")
    return table(["passkeys", *(f"{way}, {length}" for way in ways for length in lengths)], body)


def encoders_table(results: Path = RESULTS) -> str:
    """Needles in novels found by embeddings, and how near short texts stay to where they were."""
    rows, far = measured("study-minilm.jsonl", results), measured("study-minilm-4096.jsonl", results)
    furthest = {row["scheme"]: row for row in far if row["task"] == "embed_needle"}
    (length, count), *_ = {(row["length"], row["details"]["documents"]) for row in furthest.values()}
    found = {(row["scheme"], row["task"], row["length"], row["metric"]): row for row in rows}
    needles = sorted({row["length"] for row in rows if row["task"] == "embed_needle"})
    body = []
    for scheme in dict.fromkeys(row["scheme"] for row in rows):
        cells = [told(found[scheme, "embed_needle", length, "accuracy"], 2) for length in needles]
        cells.append(told(furthest[scheme], 2) if scheme in furthest else "not run")
        near = found.get((scheme, "similarity", 256, "rank_agreement"))
        body.append([named(scheme), *cells, told(near, 2) if near else ""])
    heads = ["`embed_needle` at", *map(str, needles), f"{length}, of {count} documents", "rank agreement at 256"]
    return table(heads, body)


def tuning_table(results: Path = RESULTS) -> str:
    """Losses before and after tuning, the mean over seeds, and how far the scheme is ahead of its control."""
    rows = lines_of("study-stories15M-tuning.jsonl", results)
    lengths = sorted({row["length"] for row in rows})
    body = []
    for scheme in dict.fromkeys(row["scheme"] for row in rows):
        cells = [[r for r in rows if r["scheme"] == scheme and r["length"] == length] for length in lengths]
        means = [_over_seeds([row["losses"] for row in cell]) for cell in cells]
        body.append([scheme, *(f"{value:.2f} ± {error:.2f}" for value, error in means)])
    ahead = []
    for length in lengths:
        by = {(r["scheme"], r["seed"]): r["losses"] for r in rows if r["length"] == length}
        seeds = sorted({seed for _, seed in by})
        pairs = [[a - b for a, b in zip(by[CONTROL, s], by[TUNED, s], strict=True)] for s in seeds]
        value, error = _over_seeds(pairs)
        ahead.append(f"**{value:.2f} ± {error:.2f}**")
    count = f"{len(seeds)} seed{'s' * (len(seeds) > 1)}"
    return table(["loss at", *map(str, lengths)], [*body, [f"ahead of the control ({count})", *ahead]])


def _over_seeds(samples: list[list[float]]) -> tuple[float, float]:
    """The mean of windows that all seeds share, with the larger error: over windows, or over seeds."""
    windows = [statistics.fmean(values) for values in zip(*samples, strict=True)]
    seeds = [statistics.fmean(values) for values in samples]
    errors = [statistics.stdev(values) / math.sqrt(len(values)) for values in (windows, seeds) if len(values) > 1]
    return statistics.fmean(windows), max(errors)
