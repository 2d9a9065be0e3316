"""How many cells of the first measurement of other runtimes are right, refused, wrong and untried today."""

from collections import Counter

from hf_posenc.engines.markdown import SAVED_KEYS
from hf_posenc.engines.table import look_up

ROWS = {
    "unpatched": "plain",
    "rope": "theta",
    "ntk": "theta",
    "linear": "linear",
    "yarn": "yarn",
    "yarn, attention_factor": "yarn-attention",
    "yarn, mscale": "yarn-attention",
    "yarn, betas or truncate": "yarn-betas",
    "llama3": "llama3",
    "on a llama3 RoPE": "longrope",
    "none": "none",
    "proportional": "proportional",
    "alibi": "sealed",
    "self_extend": "sealed",
    "dynamic_ntk": "sealed",
    "dca, longrope, windows": "sealed",
}
"""Schemes and variants that were measured first, with the kind that each is to a runtime."""
COLUMNS = (
    ("llama.cpp", ("llama",)),
    ("llama.cpp", ("qwen2", "qwen3")),
    ("llama.cpp", ("gemma2",)),
    ("vllm", ("llama", "qwen2", "gemma2")),
    ("mlx", ("llama",)),
    ("mlx", ("qwen3",)),
    ("ct2", ("llama", "qwen2")),
)
"""Runtimes with the model types that share a column."""
WORST_FIRST = ("wrong", "refuses", "right")
BEFORE = {"right": 23, "refuses": 15, "wrong": 42, "untried": 32}
"""Folders of version 0.1.0, on 2026-11-16."""


def cells_table() -> str:
    """The counts before and now, as Markdown. Where a column has several model types, the worst of them counts."""
    rows = {
        "before, folders as they were saved": BEFORE,
        "now, folders as they are saved": Counter(_verdict(*cell, ways=("checkpoint",)) for cell in _cells()),
        "now, by `hf-posenc export` where that helps": Counter(
            _verdict(*cell, ways=("export", "checkpoint")) for cell in _cells()
        ),
    }
    lines = ["| | right | refused | silently wrong | untried |", "|---|---|---|---|---|"]
    lines += [f"| {name} | {' | '.join(_numbers(counts))} |" for name, counts in rows.items()]
    return "\n".join(lines)


def _cells() -> list[tuple[str, tuple[str, ...], str]]:
    return [(runtime, types, kind) for runtime, types in COLUMNS for kind in ROWS.values()]


def _verdict(runtime: str, types: tuple[str, ...], kind: str, ways: tuple[str, ...]) -> str:
    known = []
    for architecture in types:
        found = [look_up(runtime, way, architecture, kind, SAVED_KEYS) for way in ways]
        known += [entry.verdict for entry in found if entry is not None and entry.verdict != "untried"][:1]
    return next((word for word in WORST_FIRST if word in known), "untried")


def _numbers(counts: dict[str, int]) -> list[str]:
    shown = [str(counts.get(word, 0)) for word in ("right", "refuses", "wrong", "untried")]
    return [*shown[:2], f"**{shown[2]}**", shown[3]]
