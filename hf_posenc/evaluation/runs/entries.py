"""The schemes to compare, each with its options."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ...core.lengths import parsed_length
from ...errors import PosencError
from ...patching.patch import patch_model
from ...schemes import SCHEMES
from ...schemes.plans import NAMED, is_plan, plan_from

LENGTHS = ("target_length", "trained_length")
CHUNKED = "chunked"
"""Not a scheme but a baseline: an encoder embeds a long text in pieces, and the embeddings are averaged."""


@dataclass(frozen=True)
class Entry:
    """A scheme with its options, and the label it was given."""

    label: str
    scheme: str
    options: dict[str, Any]


def parsed_schemes(text: str) -> list[Entry]:
    """`none,yarn:factor=4,beta_fast=16,ntk`: options follow a colon, values are JSON or text."""
    entries: list[Entry] = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        if ": " in part:  # a plan that is written out: `every 4th: none; rest: window window=4096`
            plan_from(part, {"target_length": 1})
            entries.append(Entry(part, part, {}))
            continue
        name, colon, option = part.partition(":")
        if "=" in name and entries:  # another option of the previous scheme
            name, option = "", part
        if name:
            if name != CHUNKED and name not in NAMED:
                SCHEMES[name]
            entries.append(Entry(part, name, {}))
        if option or colon:
            key, equals, value = option.partition("=")
            if not equals or not entries or entries[-1].scheme == CHUNKED:
                raise PosencError(f"A scheme's option is name=value, as in yarn:factor=4,beta_fast=16; got {part!r}.")
            entry = entries.pop()
            label = entry.label if name else f"{entry.label},{option}"
            read = parsed_length if key in LENGTHS else _value
            entries.append(Entry(label, entry.scheme, {**entry.options, key: read(value)}))
    labels = [entry.label for entry in entries]
    if not entries or len(set(labels)) < len(labels):
        raise PosencError(f"Name each scheme to compare once, as in none,linear,yarn; got {text!r}.")
    return entries


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def patch_with(model: Any, entry: Entry, target_length: int) -> None:
    """Patch the model with a scheme. Its random parts are the same each time."""
    given = dict(entry.options)
    reaches = is_plan(entry.scheme) or SCHEMES[entry.scheme].factor_reaches
    if not {"target_length", "factor"} & set(given) or not reaches:
        given.setdefault("target_length", target_length)  # dynamic_ntk's factor is head-room, not a length
    try:
        patch_model(model, entry.scheme, existing=given.pop("existing", "extend"), **given)
    except PosencError as error:
        raise type(error)(f"{entry.label}: {error}") from None
