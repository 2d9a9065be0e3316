"""Names that the command line checks and completes without importing torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from importlib.metadata import entry_points
from pathlib import Path

from ..errors import PosencError, suggestion

TASKS = (
    "perplexity",
    "loss_by_position",
    "shift",
    "passkey",
    "multikey",
    "multivalue",
    "json_kv",
    "first_sentence",
    "embed_passkey",
    "embed_needle",
)
PROTOCOLS = ("last", "sliding", "whole", "yarn")
DTYPES = ("float32", "bfloat16", "float16", "auto")
HARNESSES = ("ruler", "ruler_offline", "longbench", "babilong", "lemb")
VERIFIERS = ("llama.cpp", "transformers", "vllm", "mlx", "ct2", "onnx")
SERVERS = ("vllm", "sglang", "llama.cpp", "ollama", "tgi", "trl")
"""A test compares all of these with the code that defines them."""
EXISTING = ("extend", "replace")
PLANS = ("swan", "rnope_swa", "irope")
DECLARED = re.compile(r'^    name(?:: [^=]+)? = "(\w+)"$', re.MULTILINE)
PLUGINS = "hf_posenc.schemes"
"""The entry points through which other packages register schemes."""


@lru_cache
def scheme_names() -> tuple[str, ...]:
    """The schemes of this package, read from the text of its files, and those of installed plugins.

    Nothing is imported, since that would take seconds.
    """
    files = (Path(__file__).parent.parent / "schemes").glob("*.py")
    own = [name for file in files for name in DECLARED.findall(file.read_text(encoding="utf-8"))]
    return tuple(sorted({*own, *(point.name for point in entry_points(group=PLUGINS))}))


def check_name(kind: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise PosencError(f"Unknown {kind} {name!r}.{suggestion(name, list(known))}")


def complete_list(incomplete: str, known: Iterable[str]) -> list[str]:
    """Completions of the last name in a list with commas."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in known if name.startswith(last)]
