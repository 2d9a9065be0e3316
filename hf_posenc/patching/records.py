"""`config.posenc`: what a patched model says of itself, and how that is read back."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from ..core.effects import Effect, Geometry
from ..errors import PosencError, UnsupportedCell
from ..families import FAMILIES, Family, Places
from ..registry import Origin
from ..runtime.rotation import LAYOUTS
from ..schemes import SCHEMES, Scheme
from ..schemes.frequencies import PRESENT, present_frequencies
from ..schemes.option_checks import is_finite_number
from ..schemes.plans import BY_LIST, PLAN, Plan
from .own_temperature import TUNING, switches

Geometries = dict[str, Geometry]
"""By group of layers; "" where a model has just one."""
FORMAT = 2
"""From 2 on the weights of what is sealed hold a seal (`seal.py`)."""
KEYS = ("format", "scheme", "options", "geometry", "original")
PLANNED = 3
"""Of records of plans, which earlier versions do not know."""
REQUIRES = "requires"
"""The key for what a record needs that is not of this package, and who registered it; left out where there is none."""
CHECKSUM = "checksum"
"""The key for a number that the rest of a record gives: edited by hand it would be another model, and nothing else of
a sealed checkpoint or an adapter would tell. 0.1.0 wrote none."""


@dataclass(frozen=True)
class Record:
    """A scheme and the geometry it was applied to: together they give every number of the patch again."""

    scheme: Scheme
    geometries: Geometries
    original: dict[str, Any]
    """The config values that the patch replaced."""
    family: tuple[str, Origin] | None = dataclasses.field(default=None, compare=False)
    """The model's family, and who registered it; None where it is one of this package."""
    format: int = dataclasses.field(default=FORMAT, compare=False)
    """Of the file that it was read from."""
    edited: bool = dataclasses.field(default=False, compare=False)
    """Whether that does not give its checksum."""

    @property
    def geometry(self) -> Geometry:
        """Of the first group: lengths and sizes are the same in all."""
        return next(iter(self.geometries.values()))

    def effects(self) -> dict[str, Effect]:
        """What the scheme contributes to each group of layers; with modules of its own each time."""
        return self.scheme.effects(self.geometries)

    def to_dict(self) -> dict[str, Any]:
        written = {name: written_geometry(geometry) for name, geometry in self.geometries.items()}
        requires = self._requires()
        said = {
            "format": PLANNED if isinstance(self.scheme, Plan) else FORMAT,
            "scheme": self.scheme.name,
            "options": self.scheme.options(),
            "geometry": written.get("", written),
            "original": copy.deepcopy(self.original),
            **({REQUIRES: requires} if requires else {}),
        }
        return {**said, CHECKSUM: checksum(said)}

    def refuse_other_family(self, family: Family) -> None:
        """Raise where a model would be patched by another family's data than when the record was made."""
        made, live = self.family, family_from_outside(family)
        if (made is None) != (live is None) or (made and live and made[0] != live[0]):
            raise PosencError(
                f"The patch was made by {_told(made)}, and here the model belongs to {_told(live)}. "
                "Install or uninstall what makes the difference."
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
        """Read a record strictly: what is missing, unknown or of the wrong type raises."""
        if not isinstance(data, dict):
            raise PosencError(f"A posenc record is a JSON object, got {data!r}.")
        version = data.get("format")
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise PosencError(f"This is not a posenc record: its format is {version!r}, a whole number is expected.")
        if version > PLANNED:
            raise PosencError(
                f"This posenc record is of format {version}, and this version reads up to {PLANNED}: update hf_posenc."
            )
        _keys(data, KEYS, (*KEYS, REQUIRES, CHECKSUM), "A posenc record")
        for key in ("options", "geometry", "original", REQUIRES):
            if not isinstance(data.get(key, {}), dict):
                raise PosencError(f"In a posenc record {key} is a JSON object, got {data[key]!r}.")
        needed = data.get(REQUIRES, {})
        _keys(needed, (), ("scheme", "family"), "What a posenc record requires")
        registrar = Origin.from_dict(needed["scheme"]) if "scheme" in needed else None
        planned = data["scheme"] == PLAN and version == PLANNED
        cls_meant: type[Scheme] = Plan if planned else SCHEMES.meant(data["scheme"], registrar)
        scheme = cls_meant.from_options(data["options"])
        family = read_family(needed["family"]) if "family" in needed else None
        geometries, original = read_geometries(data["geometry"]), read_original(data["original"])
        edited = CHECKSUM in data and data[CHECKSUM] != checksum(data)
        return cls(scheme, geometries, original, family, version, edited)

    def refuse_edited(self) -> None:
        """Raise for a record that is not as it was written. To be asked last: other checks say more."""
        if self.edited:
            raise PosencError(
                f"The posenc record ({self.scheme.name!r} {self.scheme.options()}) was edited after it was written: "
                f"it does not give its {CHECKSUM}. Restore it; for other options patch the original anew."
            )


def checksum(data: dict[str, Any]) -> str:
    """Of what a record says, in whatever order."""
    said = {key: data[key] for key in (*KEYS[1:], REQUIRES) if key in data}
    plain = json.loads(json.dumps(said))  # as a file would hold it
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]


def is_listed(record: Record | None) -> bool:
    """Whether a list in the config, which some runtimes do not read, says which layers rotate."""
    return record is not None and isinstance(record.scheme, Plan) and record.scheme.by == BY_LIST


def family_from_outside(family: Family) -> tuple[str, Origin] | None:
    """A family and who registered it; None for those of this package."""
    origin = FAMILIES.origin(family.name)
    return None if origin.built_in else (family.name, origin)


def _told(family: tuple[str, Origin] | None) -> str:
    return "a family of hf_posenc itself" if family is None else f"the family {family[0]!r} of {family[1]}"


def read_family(data: Any) -> tuple[str, Origin]:
    """The family that a record requires, which must be at hand."""
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        raise PosencError(f"A family that a posenc record requires has a name, got {data!r}.")
    name, origin = data["name"], Origin.from_dict({k: v for k, v in data.items() if k != "name"})
    FAMILIES.meant(name, origin)
    return name, origin


def original_values(where: Places, scheme: Scheme | None = None) -> dict[str, Any]:
    """The config values that a patch replaces, or that the patch with this scheme does, as JSON holds them."""
    config, length, values = where.config, where.family.length, {}
    if hasattr(config, length):
        value = getattr(config, length)
        values[length] = list(value) if isinstance(value, tuple) else value
    if getattr(config, "rope_parameters", None):
        values["rope_parameters"] = copy.deepcopy(config.rope_parameters)
    for flag in flags_of(where.family):
        values[flag] = getattr(config, flag)
    for switch in () if scheme is None or not scheme.tempers else switches(config):
        values[switch] = getattr(config, switch)
    if isinstance(scheme, Plan) and scheme.by == BY_LIST:
        values[BY_LIST] = list(getattr(config, BY_LIST))
    return values


def flags_of(family: Family) -> tuple[str, ...]:
    """The flags of a config that say which positions a model of this family has."""
    return (*family.bias_flags, *filter(None, [family.table_flag]), *(family.switch or ())[:1])


def written_geometry(geometry: Geometry) -> dict[str, Any]:
    """A geometry as JSON holds it, without what says nothing."""
    given = {f.name: getattr(geometry, f.name) for f in dataclasses.fields(geometry)}
    plain = {"layout": "halves", "unturned": (), "rope": None, "grid": (), "patch": (), "layers": 0, "whole": False}
    values = {k: v for k, v in given.items() if k not in plain or v != plain[k]}
    return {k: list(v) if isinstance(v, tuple) else copy.deepcopy(v) for k, v in values.items()}


def read_geometries(data: dict[str, Any]) -> Geometries:
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
        if name in ("causal", "whole"):
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
            good = is_finite_number(value) and value >= 0
        else:
            good = whole(value)
        if not good:
            raise PosencError(f"The geometry of a posenc record has {name}={value!r}, which makes no sense.")
    if ("grid" in data) != ("patch" in data) or ("grid" in data and "layers" not in data):
        raise PosencError("The geometry of a posenc record has some of grid, patch and layers, and not all: damaged.")
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
    return Geometry(**values)


def is_rope(value: Any) -> bool:
    """Whether a value is a set of `rope_parameters` with all its numbers."""
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
    """Whether a value is one set of `rope_parameters`, or one for each type of layer; of some types there is none."""
    if isinstance(value, dict) and "rope_theta" not in value and value:
        return all(rope is None or is_rope(rope) for rope in value.values())
    return is_rope(value)


def read_original(data: dict[str, Any]) -> dict[str, Any]:
    families = list(FAMILIES.values())
    lengths = {family.length: len(family.axes) for family in families}
    flags = sorted({TUNING, *(flag for family in families for flag in flags_of(family))})
    _keys(data, (), ["rope_parameters", BY_LIST, *sorted(lengths), *flags], "The original of a posenc record")
    good = all(is_size(data[name], axes) for name, axes in lengths.items() if name in data)
    good &= all(isinstance(data[name], bool) for name in flags if name in data)
    rotating = data.get(BY_LIST, [])
    good &= isinstance(rotating, list) and all(type(n) is int and n in (0, 1) for n in rotating)
    if not good or not (data.get("rope_parameters") is None or are_ropes(data["rope_parameters"])):
        raise PosencError(f"The original of a posenc record makes no sense: {data!r}.")
    return copy.deepcopy(data)


def section_of(raw: dict[str, Any], family: Family | None) -> dict[str, Any]:
    """The part of a config.json that speaks of positions: all of it, unless the model has other parts as well."""
    named = family.part[1] if family is not None and family.part else None
    # One that is named is left out of the file where it says nothing but what its class does.
    section = raw.setdefault(named, {}) if named else raw.get("text_config")
    return section if isinstance(section, dict) else raw


def is_size(value: Any, axes: int) -> bool:
    """Whether a value is a length or, where there are several axes, one side or all of them."""
    if axes > 1 and isinstance(value, list):
        return len(value) == axes and all(map(whole, value))
    return whole(value)


def whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _keys(data: dict[str, Any], needed: Any, known: Any, what: str) -> None:
    missing, unknown = sorted(set(needed) - set(data)), sorted(set(data) - set(known))
    if missing:
        raise PosencError(f"{what} lacks {', '.join(missing)}.")
    if unknown:
        raise PosencError(f"{what} has unknown keys: {', '.join(map(str, unknown))}.")
