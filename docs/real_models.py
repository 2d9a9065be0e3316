"""Tables of docs/study.md, from the lines that its commands wrote into docs/results."""

import json
from pathlib import Path
from typing import Any

from hf_posenc.evaluation.measures.retrieval import accuracy

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]
LENGTHS = (4096, 8192, 12288, 16384)
TAXED = (4096, 8192)


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
    rows = measured("study-minilm.jsonl", results)
    found = {(row["scheme"], row["task"], row["length"], row["metric"]): row for row in rows}
    needles = sorted({row["length"] for row in rows if row["task"] == "embed_needle"})
    body = []
    for scheme in dict.fromkeys(row["scheme"] for row in rows):
        cells = [told(found[scheme, "embed_needle", length, "accuracy"], 2) for length in needles]
        near = found.get((scheme, "similarity", 256, "rank_agreement"))
        body.append([named(scheme), *cells, told(near, 2) if near else ""])
    return table(["`embed_needle` at", *map(str, needles), "rank agreement at 256"], body)
