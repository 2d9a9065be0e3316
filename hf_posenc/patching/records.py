"""`config.posenc`: what a patched model says of itself, and how that is read back."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any

from ..core.effects import Effect, Geometry, finite
from ..errors import PosencError, UnsupportedCell
from ..families import FAMILIES, IMAGE_FAMILIES, image_family
from ..runtime.positions import LAYOUTS
from ..schemes import SCHEMES, Scheme
from ..schemes.frequencies import PRESENT, present_frequencies

FORMAT = 2
"""From 2 on the weights of what is sealed hold a seal (`seal.py`)."""
KEYS = ("format", "scheme", "options", "geometry", "original")


@dataclass(frozen=True)
class Record:
    """A scheme and the geometry it was applied to: together they give every number of the patch again."""

    scheme: Scheme
    geometries: dict[str, Geometry]
    """By group of layers; "" where the patch is the same for all."""
    original: dict[str, Any]
    """The config values that the patch replaced."""
    format: int = dataclasses.field(default=FORMAT, compare=False)
    """Of the file that it was read from."""

    @property
    def geometry(self) -> Geometry:
        """Of the first group: lengths and sizes are the same in all."""
        return next(iter(self.geometries.values()))

    def effects(self) -> dict[str, Effect]:
        return {name: self.scheme.effect(geometry) for name, geometry in self.geometries.items()}

    def to_dict(self) -> dict[str, Any]:
        written = {name: written_geometry(geometry) for name, geometry in self.geometries.items()}
        return {
            "format": FORMAT,
            "scheme": self.scheme.name,
            "options": self.scheme.options(),
            "geometry": written.get("", written),
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
        return cls(scheme, read_geometries(data["geometry"]), read_original(data["original"]), version)


def written_geometry(geometry: Geometry) -> dict[str, Any]:
    """A geometry as JSON holds it, without what says nothing."""
    given = {f.name: getattr(geometry, f.name) for f in dataclasses.fields(geometry)}
    plain = {"layout": "halves", "unturned": (), "rope": None, "grid": (), "patch": (), "layers": 0}
    values = {k: v for k, v in given.items() if k not in plain or v != plain[k]}
    return {k: list(v) if isinstance(v, tuple) else copy.deepcopy(v) for k, v in values.items()}


def read_geometries(data: dict[str, Any]) -> dict[str, Geometry]:
    """One geometry, or one for each group of layers that has positions of its own."""
    groups = {k: v for k, v in data.items() if isinstance(v, dict) and k != "rope"}
    if groups and len(groups) == len(data):
        return {name: read_geometry(group) for name, group in groups.items()}
    return {"": read_geometry(data)}


def read_geometry(data: dict[str, Any]) -> Geometry:
    fields = {f.name: f for f in dataclasses.fields(Geometry)}
    needed = [n for n, f in fields.items() if f.default is dataclasses.MISSING]
    _keys(data, needed, list(fields), "The geometry of a posenc record")
    for name, value in data.items():
        if name == "causal":
            good = isinstance(value, bool)
        elif name == "rope":
            good = is_rope(value)
        elif name == "layout":
            good = value in LAYOUTS
        elif name == "unturned":
            good = isinstance(value, list) and all(isinstance(n, int) and n >= 0 for n in value)
        elif name in ("grid", "patch"):
            good = isinstance(value, list) and len(value) == 2 and all(map(whole, value))
        elif name == "initializer_range":
            good = finite(value) and value >= 0
        else:
            good = whole(value)
        if not good:
            raise PosencError(f"The geometry of a posenc record has {name}={value!r}, which makes no sense.")
    if len({"grid", "patch", "layers"} & set(data)) not in (0, 3):
        raise PosencError("The geometry of a posenc record has some of grid, patch and layers, and not all: damaged.")
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
    return Geometry(**values)


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
    lengths = sorted({family.length for family in FAMILIES.values()})
    switches = sorted({family.switch[0] for family in FAMILIES.values() if family.switch})
    for image in IMAGE_FAMILIES.values():
        switches += [*image.bias_flags, *filter(None, [image.table_flag])]
    _keys(data, (), ["rope_parameters", "image_size", *lengths, *switches], "The original of a posenc record")
    rope = data.get("rope_parameters")
    sets = [rope] if is_rope(rope) or not isinstance(rope, dict) else list(rope.values())
    good = all(whole(data[name]) for name in lengths if name in data)
    good &= all(isinstance(data[name], bool) for name in switches if name in data)
    size = data.get("image_size", 1)
    good &= all(map(whole, size)) and len(size) == 2 if isinstance(size, list) else whole(size)
    if not good or any(one is not None and not is_rope(one) for one in sets):
        raise PosencError(f"The original of a posenc record makes no sense: {data!r}.")
    return copy.deepcopy(data)


def text_section(raw: dict[str, Any]) -> dict[str, Any]:
    """The part of a config.json that speaks of the text model: all of it, unless the model has other parts as well."""
    section = raw.get("text_config")
    return section if isinstance(section, dict) else raw


def vision_section(raw: dict[str, Any], kind: str) -> dict[str, Any]:
    """The part of a config.json of this model type that speaks of images."""
    family = image_family(kind)
    if family is None or kind not in family.wholes:
        return raw
    section: dict[str, Any] = raw.setdefault("vision_config", {})
    return section


def whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _keys(data: dict[str, Any], needed: Any, known: Any, what: str) -> None:
    missing, unknown = sorted(set(needed) - set(data)), sorted(set(data) - set(known))
    if missing:
        raise PosencError(f"{what} lacks {', '.join(missing)}.")
    if unknown:
        raise PosencError(f"{what} has unknown keys: {', '.join(map(str, unknown))}.")
