"""What a check finds, and the list of all checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

WRONG, SUSPICIOUS, NOTE = "wrong", "suspicious", "note"
LEVELS = {
    WRONG: "somebody computes something else than is meant, or nothing loads it",
    SUSPICIOUS: "it may be meant so; look again",
    NOTE: "true, and worth knowing",
}


@dataclass(frozen=True)
class Finding:
    """Something to know about positions, and what to do."""

    level: str
    text: str
    remedy: str
    check: str = ""
    """The name of the check that found it."""
    where: str = ""
    """The file or part that it is about, where that is not the one that was asked about."""

    def __str__(self) -> str:
        place = f" ({self.where})" if self.where else ""
        return f"{self.level}: {self.text}{place}\n  {self.check}: {self.remedy}"


Look = Callable[[Any], Iterator[Finding]]
CHECKS: dict[str, dict[str, Look]] = {"checkpoint": {}, "adapter": {}, "gguf": {}, "serving": {}}
"""By kind of thing, by name."""


def check(kind: str, name: str) -> Callable[[Look], Look]:
    """Register a function that yields findings about things of a kind."""

    def register(look: Look) -> Look:
        CHECKS[kind][name] = look
        return look

    return register


def findings(kind: str, thing: Any, where: str = "") -> list[Finding]:
    """What all checks of a kind find. One that fails says so: an odd file must not end the others."""
    found = []
    for name, look in CHECKS[kind].items():
        try:
            found += [replace(one, check=name, where=one.where or where) for one in look(thing)]
        except Exception as error:
            if any(one.text == str(error) for one in found):
                continue
            text = f"this could not be checked: {type(error).__name__}: {error}"
            found.append(Finding(SUSPICIOUS, text, "Look at the file itself: it is odd.", name, where))
    order = list(LEVELS)
    return sorted(found, key=lambda one: order.index(one.level))
