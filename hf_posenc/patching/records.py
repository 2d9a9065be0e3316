"""`config.posenc`: the record that a patched model keeps of its patch, and how it is read back."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from ..compat.pytorch import usual_defaults
from ..core.effects import Effect, Geometry
from ..errors import PosencError, UnsupportedCell
from ..families import FAMILIES, Family, Places
from ..registry import Origin
from ..runtime.rotation import LAYOUTS
from ..schemes import SCHEMES, Scheme
from ..schemes.frequencies import PRESENT, present_frequencies
from ..schemes.option_checks import is_finite_number
from ..schemes.plans import BY_LIST, PLAN, Plan
from .own_temperature import TUNING

Geometries = dict[str, Geometry]
"""By name of a group of layers, which is "" where a model has just one group."""
FORMAT = 2
"""From format 2 on, the weights of a sealed model hold a seal (`seal.py`)."""
KEYS = ("format", "scheme", "options", "geometry", "original")
PLAN_FORMAT = 3
"""The format of records of plans, which earlier versions cannot read."""
REQUIRES = "requires"
"""The key for a scheme or a family from outside this package, and for who registered it; left out where there is
none."""
CHECKSUM = "checksum"
"""The key for a number computed from the rest of the record. A record that was edited by hand means another model, and
nothing else in a sealed checkpoint or an adapter would show that. Version 0.1.0 wrote no checksum."""


@dataclass(frozen=True)
class Record:
    """A scheme and the geometry it was applied to. Every number of the patch can be computed from these two again."""

    scheme: Scheme
    geometries: Geometries
    original: dict[str, Any]
    """The values in the config that the patch replaced."""
    family: tuple[str, Origin] | None = dataclasses.field(default=None, compare=False)
    """The model's family, and who registered it; None for a family of this package."""
    format: int = dataclasses.field(default=FORMAT, compare=False)
    """The format of the file that the record was read from."""
    edited: bool = dataclasses.field(default=False, compare=False)
    """Whether the file's checksum is not that of its content."""

    @property
    def geometry(self) -> Geometry:
        """The geometry of the first group; lengths and sizes are the same in all groups."""
        return next(iter(self.geometries.values()))

    @usual_defaults()
    def effects(self) -> dict[str, Effect]:
        """What the scheme contributes to each group of layers. Every call makes new modules."""
        return self.scheme.effects(self.geometries)

    def to_dict(self) -> dict[str, Any]:
        written = {name: geometry_to_dict(geometry) for name, geometry in self.geometries.items()}
        requires = self._requires()
        data = {
            "format": PLAN_FORMAT if isinstance(self.scheme, Plan) else FORMAT,
            "scheme": self.scheme.name,
            "options": self.scheme.options(),
            "geometry": written.get("", written),
            "original": copy.deepcopy(self.original),
            **({REQUIRES: requires} if requires else {}),
        }
        return {**data, CHECKSUM: checksum(data)}

    def refuse_other_family(self, family: Family) -> None:
        """Raise where the record was made with another family than the one that serves the model here."""
        made, live = self.family, outside_family(family)
        if (made is None) != (live is None) or (made and live and made[0] != live[0]):
            raise PosencError(
                f"The patch was made by {_name_family(made)}, and here the model belongs to {_name_family(live)}. "
                "Install or uninstall the package that makes the difference."
            )

    def _requires(self) -> dict[str, dict[str, str]]:
        needed = {}
        if not isinstance(self.scheme, Plan) and not (origin := SCHEMES.origin(self.scheme.name)).built_in:
            needed["scheme"] = origin.to_dict()
        if self.family is not None:
            name, registrar = self.family
            needed["family"] = {"name": name, **registrar.to_dict()}
        return needed

    @classmethod
    def from_dict(cls, data: Any) -> Record:
        """Read a record strictly: a key that is missing or unknown, or has a value of the wrong type, raises."""
        if not isinstance(data, dict):
            raise PosencError(f"A posenc record is a JSON object, got {data!r}.")
        version = data.get("format")
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise PosencError(f"This is not a posenc record: its format is {version!r}, a whole number is expected.")
        if version > PLAN_FORMAT:
            raise PosencError(
                f"This posenc record is of format {version}, and this version reads up to {PLAN_FORMAT}: update "
                "hf_posenc."
            )
        _check_keys(data, KEYS, (*KEYS, REQUIRES, CHECKSUM), "A posenc record")
        for key in ("options", "geometry", "original", REQUIRES):
            if not isinstance(data.get(key, {}), dict):
                raise PosencError(f"In a posenc record {key} is a JSON object, got {data[key]!r}.")
        needed = data.get(REQUIRES, {})
        _check_keys(needed, (), ("scheme", "family"), "What a posenc record requires")
        registrar = Origin.from_dict(needed["scheme"]) if "scheme" in needed else None
        is_plan = data["scheme"] == PLAN and version == PLAN_FORMAT
        scheme_class: type[Scheme] = Plan if is_plan else SCHEMES.resolve(data["scheme"], registrar)
        scheme = scheme_class.from_options(data["options"])
        family = read_family(needed["family"]) if "family" in needed else None
        geometries, original = read_geometries(data["geometry"]), read_original(data["original"])
        edited = CHECKSUM in data and data[CHECKSUM] != checksum(data)
        return cls(scheme, geometries, original, family, version, edited)

    def refuse_edited(self) -> None:
        """Raise for a record that is not as it was written. Call this last: the other checks say more."""
        if self.edited:
            raise PosencError(
                f"The posenc record ({self.scheme.name!r} {self.scheme.options()}) was edited after it was written: "
                f"its {CHECKSUM} does not fit. Restore it; to have other options, patch the original model again."
            )


def checksum(data: dict[str, Any]) -> str:
    """The checksum of a record, which does not depend on the order of its keys."""
    content = {key: data[key] for key in (*KEYS[1:], REQUIRES) if key in data}
    plain = json.loads(json.dumps(content))  # as a file would hold it
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]


def uses_layer_list(record: Record | None) -> bool:
    """Whether the scheme is a plan that the config says by a list of the layers that rotate."""
    return record is not None and isinstance(record.scheme, Plan) and record.scheme.by == BY_LIST


def outside_family(family: Family) -> tuple[str, Origin] | None:
    """The name of a family and who registered it; None for a family of this package."""
    origin = FAMILIES.origin(family.name)
    return None if origin.built_in else (family.name, origin)


def _name_family(family: tuple[str, Origin] | None) -> str:
    return "a family of hf_posenc itself" if family is None else f"the family {family[0]!r} of {family[1]}"


def read_family(data: Any) -> tuple[str, Origin]:
    """The family that a record requires. Raises where it is not installed."""
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        raise PosencError(f"A family that a posenc record requires has a name, got {data!r}.")
    name, origin = data["name"], Origin.from_dict({k: v for k, v in data.items() if k != "name"})
    FAMILIES.resolve(name, origin)
    return name, origin


def original_values(where: Places, scheme: Scheme | None = None) -> dict[str, Any]:
    """The values in the config that a patch replaces, as JSON holds them.

    With a scheme, also those that only a patch with this scheme replaces.
    """
    config, length, values = where.config, where.family.length, {}
    if hasattr(config, length):
        value = getattr(config, length)
        values[length] = list(value) if isinstance(value, tuple) else value
    if getattr(config, "rope_parameters", None):
        values["rope_parameters"] = copy.deepcopy(config.rope_parameters)
    for flag in where.family.flags:
        values[flag] = getattr(config, flag)
    if scheme is not None and hasattr(config, TUNING) and scheme.has_temperature:
        values[TUNING] = getattr(config, TUNING)
    if isinstance(scheme, Plan) and scheme.by == BY_LIST:
        values[BY_LIST] = list(getattr(config, BY_LIST))
    return values


def geometry_to_dict(geometry: Geometry) -> dict[str, Any]:
    """A geometry as JSON holds it. Some fields are left out where they have their defaults."""
    fields = {f.name: getattr(geometry, f.name) for f in dataclasses.fields(geometry)}
    plain = {"layout": "halves", "unturned": (), "rope": None, "grid": (), "patch": (), "layers": 0, "whole": False}
    values = {k: v for k, v in fields.items() if k not in plain or v != plain[k]}
    return {k: list(v) if isinstance(v, tuple) else copy.deepcopy(v) for k, v in values.items()}


def read_geometries(data: dict[str, Any]) -> Geometries:
    """One geometry, or one for each group of layers that has its own positions."""
    groups = {k: v for k, v in data.items() if isinstance(v, dict) and k != "rope"}
    if groups and len(groups) == len(data):
        return {name: read_geometry(group) for name, group in groups.items()}
    return {"": read_geometry(data)}


def read_geometry(data: dict[str, Any]) -> Geometry:
    fields = {f.name: f for f in dataclasses.fields(Geometry)}
    needed = [n for n, f in fields.items() if f.default is dataclasses.MISSING]
    _check_keys(data, needed, list(fields), "The geometry of a posenc record")
    for name, value in data.items():
        if name in ("causal", "whole"):
            good = isinstance(value, bool)
        elif name == "rope":
            good = is_rope(value)
        elif name == "layout":
            good = value in LAYOUTS
        elif name == "unturned":
            good = isinstance(value, list) and all(isinstance(n, int) and n >= 0 for n in value)
        elif name in ("grid", "patch"):
            good = isinstance(value, list) and len(value) == 2 and all(map(is_count, value))
        elif name == "initializer_range":
            good = is_finite_number(value) and value >= 0
        else:
            good = is_count(value)
        if not good:
            raise PosencError(f"The geometry of a posenc record has {name}={value!r}, which makes no sense.")
    if ("grid" in data) != ("patch" in data) or ("grid" in data and "layers" not in data):
        raise PosencError("The geometry of a posenc record has some of grid, patch and layers, and not all: damaged.")
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
    return Geometry(**values)


def is_rope(value: Any) -> bool:
    """Whether a value is one complete set of `rope_parameters`."""
    if not isinstance(value, dict) or not is_finite_number(value.get("rope_theta")) or value["rope_theta"] <= 1:
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


def are_ropes(value: Any) -> bool:
    """Whether a value is one set of `rope_parameters`, or has one (or None) for each type of layer."""
    if isinstance(value, dict) and "rope_theta" not in value and value:
        return all(rope is None or is_rope(rope) for rope in value.values())
    return is_rope(value)


def read_original(data: dict[str, Any]) -> dict[str, Any]:
    families = list(FAMILIES.values())
    lengths = {family.length: len(family.axes) for family in families}
    flags = sorted({TUNING}.union(*[family.flags for family in families]))
    _check_keys(data, (), ["rope_parameters", BY_LIST, *sorted(lengths), *flags], "The original of a posenc record")
    good = all([is_size(data[name], axes) for name, axes in lengths.items() if name in data])
    good &= all([isinstance(data[name], bool) for name in flags if name in data])
    rotating = data.get(BY_LIST, [])
    good &= isinstance(rotating, list) and all(type(n) is int and n in (0, 1) for n in rotating)
    if not good or not (data.get("rope_parameters") is None or are_ropes(data["rope_parameters"])):
        raise PosencError(f"The original of a posenc record makes no sense: {data!r}.")
    return copy.deepcopy(data)


def section_of(raw: dict[str, Any], family: Family | None) -> dict[str, Any]:
    """The part of a config.json that describes positions: all of it, unless the model has several parts."""
    name = family.part[1] if family is not None and family.part else None
    # The file leaves out a named section whose values are all the defaults of its class.
    section = raw.setdefault(name, {}) if name else raw.get("text_config")
    return section if isinstance(section, dict) else raw


def is_size(value: Any, axes: int) -> bool:
    """Whether a value is a length or, where there are several axes, one number for all sides or one for each."""
    if axes > 1 and isinstance(value, list):
        return len(value) == axes and all(map(is_count, value))
    return is_count(value)


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _check_keys(data: dict[str, Any], needed: Any, known: Any, what: str) -> None:
    missing, unknown = sorted(set(needed) - set(data)), sorted(set(data) - set(known))
    if missing:
        raise PosencError(f"{what} lacks {', '.join(missing)}.")
    if unknown:
        raise PosencError(f"{what} has unknown keys: {', '.join(map(str, unknown))}.")
