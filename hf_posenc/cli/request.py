"""The arguments of `eval` and `compare`, checked before anything slow is imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..core.lengths import parsed_length
from ..errors import PosencError
from ..evaluation.measures.text_files import read_texts
from ..evaluation.runs.outputs import refuse_outputs
from .names import DTYPES, PLANS, PROTOCOLS, TASKS, check_name, scheme_names

COUNTS = {
    "windows": "--windows",
    "scored": "--scored",
    "stride": "--stride",
    "trials": "--trials",
    "distractors": "--distractors",
    "queries": "--queries",
    "stacks": "--documents",
    "samples": "--samples",
    "batch_size": "--batch-size",
}
"""Arguments that count something, and their options."""


@dataclass(frozen=True)
class Request:
    """Parsed arguments. Those that need no parsing are attributes too, from `given`."""

    given: Mapping[str, Any]
    lengths: list[int]
    """Empty if they follow from the model's trained length."""
    tasks: tuple[str, ...]
    depths: tuple[float, ...]
    max_tokens: int | None
    texts: dict[str, str]
    """The texts by the name of their file."""
    target: int = 0
    """The length that schemes extend to."""
    step: int | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return self.given[name]
        except KeyError:
            raise AttributeError(name) from None


def parse_request(given: Mapping[str, Any], lengths: list[int], tasks: str, target: int = 0) -> Request:
    """Parse the arguments, and raise for every mistake that can be found without the model."""
    names = tuple(filter(None, (name.strip() for name in (given["tasks"] or tasks).split(","))))
    if not names and not given.get("harness"):
        raise PosencError(
            f"--tasks {given['tasks']!r} names no task. Take some of {', '.join(TASKS)}, or leave it out."
        )
    for name in names:
        check_name("task", name, TASKS)
    check_name("protocol", given["protocol"], PROTOCOLS)
    check_name("dtype", given["dtype"], DTYPES)
    if given["device_map"] is not None:
        check_name("device map", given["device_map"], ("auto",))
        if given["device"] is not None:
            raise PosencError(
                "--device puts the model on one device, and --device-map spreads it over several: give only one."
            )
    refuse_counts(given)
    wanting = [name for name in names if name in ("perplexity", "loss_by_position", "shift")]
    if wanting and not given["text"]:
        raise PosencError(f"{wanting[0]} reads text, and none was given: name files, folders or patterns with --text.")
    refuse_outputs(given["json_file"], given["report"], given["out"])
    return Request(
        given=given,
        lengths=lengths,
        tasks=names,
        depths=parse_depths(given["depths"]),
        max_tokens=parsed_length(given["max_tokens"]) if given["max_tokens"] else None,
        texts=read_texts(given["text"]) if given["text"] else {},
        target=target,
        step=parsed_length(given["step"]) if given["step"] else None,
    )


def refuse_counts(given: Mapping[str, Any]) -> None:
    for name, option in COUNTS.items():
        if given.get(name) is not None and given[name] < 1:
            raise PosencError(f"{option} must be a whole number from 1 up, got {given[name]}.")


def parse_depths(text: str) -> tuple[float, ...]:
    try:
        depths = tuple(float(depth) for depth in text.split(","))
    except ValueError:
        depths = ()
    if not depths or not all(0 <= depth <= 1 for depth in depths):
        raise PosencError(f"--depths takes numbers from 0 (the start) to 1 (the end) with commas, got {text!r}.")
    return depths


def refuse_unknown_schemes(schemes: str) -> None:
    """Check the names alone: a scheme checks its own options, and takes seconds to import."""
    for part in filter(None, (piece.strip() for piece in schemes.split(","))):
        name, _, _ = part.partition(":")
        if "=" not in name and ": " not in part:  # a plan that is written out
            check_name("scheme", name, (*scheme_names(), *PLANS, "chunked"))
