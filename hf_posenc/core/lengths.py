"""Reads lengths as users write them, 4096 or 4k, in the same way for the command line, recipes and evaluation."""

from __future__ import annotations

import re

from ..errors import PosencError

UNITS = {"": 1, "k": 1024, "m": 1024 * 1024}


def parsed_length(text: str | int) -> int:
    """A length in tokens: `2k` is 2048."""
    found = re.fullmatch(r"(\d+)([km]?)", str(text).strip().lower())
    if found is None or not int(found[1]):
        raise PosencError(f"A length is a number of tokens such as 4096 or 4k (4 x 1024), got {text!r}.")
    return int(found[1]) * UNITS[found[2]]


def parsed_lengths(text: str) -> list[int]:
    """The lengths of a list such as `2k,4k`, sorted and without duplicates."""
    return sorted({parsed_length(part) for part in text.split(",")})
