"""The results of trying every model type that transformers knows. `make sweep` makes them anew."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

FILE = "verified.json"
FAILED = ("refused", "wrong", "cannot")


@cache
def verified_families() -> dict[str, Any]:
    """`about` has the versions. `families` has, for each model type, a verdict for each scheme, or one under "*"."""
    table: dict[str, Any] = json.loads(files(__package__).joinpath(FILE).read_text(encoding="utf-8"))
    return table


def works(verdict: str) -> bool:
    return not verdict.startswith(FAILED)


def summary(verdicts: dict[str, str]) -> tuple[str, str, str]:
    """A family in one line: a verdict, the schemes that work with who can load them, and why others do not work."""
    grades: dict[str, list[str]] = {}
    for scheme, verdict in verdicts.items():
        if works(verdict):
            grades.setdefault(verdict, []).append(scheme)
    reasons = list(dict.fromkeys(v for v in verdicts.values() if not works(v)))
    word = "works" if not reasons else "in part" if grades else reasons[0].partition(":")[0]
    done = "; ".join(f"{grade}: {', '.join(schemes)}" for grade, schemes in grades.items())
    why = " / ".join(reason.partition(": ")[2] for reason in reasons)
    missing = [scheme for scheme, verdict in verdicts.items() if not works(verdict) and scheme != "*"]
    return word, done, f"{', '.join(missing)}: {why}" if missing and grades else why
