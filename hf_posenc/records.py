"""`config.posenc`: what a patched model says of itself, and how that is read back."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any

from .registry import PosencError, UnsupportedCell
from .schemes import SCHEMES, Scheme
from .schemes.frequencies import PRESENT, present_frequencies
from .sites import Geometry, finite

FORMAT = 1
KEYS = ("format", "scheme", "options", "geometry", "original")

ORIGINAL = ("max_position_embeddings", "rope_parameters")


@dataclass(frozen=True)
class Record:
    """A scheme and the geometry it was applied to: together they give every number of the patch again."""

    scheme: Scheme
    geometry: Geometry
    original: dict[str, Any]
    """The config values that the patch replaced."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "scheme": self.scheme.name,
            "options": self.scheme.options(),
            "geometry": {k: v for k, v in dataclasses.asdict(self.geometry).items() if v is not None},
            "original": copy.deepcopy(self.original),
        }

    @classmethod
    def from_dict(cls, data: Any) -> Record:
        """Read a record strictly: what is missing, unknown or of the wrong type raises."""
        if not isinstance(data, dict):
            raise PosencError(f"A posenc record is a JSON object, got {data!r}.")
        version = data.get("format")
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise PosencError(f"This is not a posenc record: its format is {version!r}, a whole number is expected.")
        if version > FORMAT:
            raise PosencError(
                f"This posenc record is of format {version} and this hf_posenc reads up to {FORMAT}: update hf_posenc."
            )
        _keys(data, KEYS, KEYS, "A posenc record")
        for key in ("options", "geometry", "original"):
            if not isinstance(data[key], dict):
                raise PosencError(f"In a posenc record {key} is a JSON object, got {data[key]!r}.")
        scheme = SCHEMES[data["scheme"]].from_options(data["options"])
        return cls(scheme, read_geometry(data["geometry"]), read_original(data["original"]))


def read_geometry(data: dict[str, Any]) -> Geometry:
    fields = {f.name: f for f in dataclasses.fields(Geometry)}
    needed = [n for n, f in fields.items() if f.default is dataclasses.MISSING]
    _keys(data, needed, list(fields), "The geometry of a posenc record")
    for name, value in data.items():
        if name == "causal":
            good = isinstance(value, bool)
        elif name == "rope":
            good = is_rope(value)
        elif name == "initializer_range":
            good = finite(value) and value >= 0
        else:
            good = isinstance(value, int) and not isinstance(value, bool) and value > 0
        if not good:
            raise PosencError(f"The geometry of a posenc record has {name}={value!r}, which makes no sense.")
    return Geometry(**data)


def is_rope(value: Any) -> bool:
    """Whether a value is a set of `rope_parameters` with all its numbers."""
    if not isinstance(value, dict) or not finite(value.get("rope_theta")) or value["rope_theta"] <= 1:
        return False
    kind = value.get("rope_type", "default")
    if not isinstance(kind, str):
        return False
    try:
        present_frequencies({**value, "rope_type": kind if kind in PRESENT else "default"}, 8)
    except UnsupportedCell:
        return True
    except (KeyError, TypeError, ValueError, ArithmeticError):
        return False
    return True


def read_original(data: dict[str, Any]) -> dict[str, Any]:
    _keys(data, ["max_position_embeddings"], ORIGINAL, "The original of a posenc record")
    length, rope = data["max_position_embeddings"], data.get("rope_parameters")
    good = isinstance(length, int) and not isinstance(length, bool) and length > 0
    if not good or (rope is not None and not is_rope(rope)):
        raise PosencError(f"The original of a posenc record makes no sense: {data!r}.")
    return copy.deepcopy(data)


def _keys(data: dict[str, Any], needed: Any, known: Any, what: str) -> None:
    missing, unknown = sorted(set(needed) - set(data)), sorted(set(data) - set(known))
    if missing:
        raise PosencError(f"{what} lacks {', '.join(missing)}.")
    if unknown:
        raise PosencError(f"{what} has unknown keys: {', '.join(map(str, unknown))}.")
