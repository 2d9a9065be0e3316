"""`config.posenc`: what a patched model says of itself, and how that is read back."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from .registry import PosencError
from .schemes import SCHEMES, Scheme
from .sites import Geometry, finite

FORMAT = 1
KEYS = ("format", "scheme", "options", "geometry")


@dataclass(frozen=True)
class Record:
    """A scheme and the geometry it was applied to: together they give every number of the patch again."""

    scheme: Scheme
    geometry: Geometry

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "scheme": self.scheme.name,
            "options": self.scheme.options(),
            "geometry": {k: v for k, v in dataclasses.asdict(self.geometry).items() if v is not None},
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
        options, geometry = data["options"], data["geometry"]
        if not isinstance(options, dict) or not isinstance(geometry, dict):
            raise PosencError("In a posenc record, options and geometry are JSON objects.")
        return cls(SCHEMES[data["scheme"]].from_options(options), read_geometry(geometry))


def read_geometry(data: dict[str, Any]) -> Geometry:
    fields = {f.name: f for f in dataclasses.fields(Geometry)}
    needed = [n for n, f in fields.items() if f.default is dataclasses.MISSING]
    _keys(data, needed, list(fields), "The geometry of a posenc record")
    for name, value in data.items():
        if name == "causal":
            good = isinstance(value, bool)
        elif name == "rope":
            good = isinstance(value, dict) and finite(value.get("rope_theta"))
        elif name == "initializer_range":
            good = finite(value) and value >= 0
        else:
            good = isinstance(value, int) and not isinstance(value, bool) and value > 0
        if not good:
            raise PosencError(f"The geometry of a posenc record has {name}={value!r}, which makes no sense.")
    return Geometry(**data)


def _keys(data: dict[str, Any], needed: Any, known: Any, what: str) -> None:
    missing, unknown = sorted(set(needed) - set(data)), sorted(set(data) - set(known))
    if missing:
        raise PosencError(f"{what} lacks {', '.join(missing)}.")
    if unknown:
        raise PosencError(f"{what} has unknown keys: {', '.join(map(str, unknown))}.")
