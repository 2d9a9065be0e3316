"""Registries of schemes and families, by name: built in, from installed packages, or from the user's own modules."""

from __future__ import annotations

import re
import warnings
from collections.abc import ItemsView, Iterable, Iterator, Mapping, ValuesView
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from typing import Any, Generic, TypeVar

from .errors import PosencError, suggestion

T = TypeVar("T")
OURS = __name__.partition(".")[0]


@dataclass(frozen=True)
class Origin:
    """The module that registered an entry, and its installed package if that package declares an entry point."""

    module: str
    package: str | None = None
    version: str | None = None

    @property
    def built_in(self) -> bool:
        return _top_package(self.module) == OURS

    def __str__(self) -> str:
        if self.built_in:
            return "hf_posenc itself"
        return f"the package {self.package!r}" if self.package else f"the module {self.module!r}"

    def to_dict(self) -> dict[str, str]:
        return {key: value for key, value in asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, data: Any) -> Origin:
        known = {"module", "package", "version"}
        if not isinstance(data, dict) or not {"module"} <= set(data) <= known or not _all_text(data.values()):
            raise PosencError(
                "An origin is a dictionary of texts with the key 'module', and 'package' and 'version' where there is "
                f"a package; got {data!r}. The record is damaged."
            )
        return cls(**data)

    def matches(self, other: Origin) -> bool:
        """Whether both may be the same code. Two modules without a package match, whatever they are called."""
        return self.built_in == other.built_in and _normal_name(self.package) == _normal_name(other.package)


class Plugins:
    """The entry points of one group. Each has the name of the entry that its module registers, and is imported only
    when that name is looked up."""

    def __init__(self, group: str):
        self.group = group
        self.registries: list[Registry[Any]] = []
        self.faults: dict[str, str] = {}
        """Why an entry point could not be loaded, by its name."""
        self._done: set[str] = set()

    def names(self) -> list[str]:
        return sorted({point.name for point in _entry_points(self.group)})

    def load(self, name: str) -> None:
        """Import the entry point of this name, if a package offers one. Raises if that fails."""
        if name not in self._done:
            offers = [point for point in _entry_points(self.group) if point.name == name]
            if not offers:
                return
            self._done.add(name)
            fault = self._fault(name, offers)
            if fault is not None:
                self.faults[name] = fault
        if name in self.faults:
            raise PosencError(self.faults[name])

    def load_all(self) -> None:
        """Import all entry points. One that fails gives a warning, so that the others still work."""
        for name in self.names():
            if name in self._done:
                continue
            try:
                self.load(name)
            except PosencError as fault:
                warnings.warn(str(fault), stacklevel=4)

    def _fault(self, name: str, offers: list[metadata.EntryPoint]) -> str | None:
        packages = sorted({_package(point)[0] for point in offers})
        if len(packages) > 1:
            return f"{name!r} is offered by several packages, {' and '.join(packages)}: uninstall all but one."
        said = f"The package {packages[0]!r} offers {name!r} (entry point {offers[0].value!r} of {self.group})"
        try:
            offers[0].load()
        except Exception as error:  # code of another package, which may fail in any way
            return f"{said} and cannot be loaded: {type(error).__name__}: {error}. Update or uninstall it."
        if not any(name in registry.registered() for registry in self.registries):
            return (
                f"{said}, and importing that registers nothing of this name: an entry point is named after what it "
                "registers. Update or uninstall the package."
            )
        return None


class Registry(Mapping[str, T], Generic[T]):
    """A mapping from names to entries. The error about an unknown name suggests the closest known one."""

    def __init__(self, kind: str, plugins: Plugins):
        self.kind, self.plugins = kind, plugins
        plugins.registries.append(self)
        self._entries: dict[str, T] = {}
        self._homes: dict[str, str] = {}

    def add(self, name: str, entry: T, module: str) -> T:
        """Register an entry. A module that runs again (a notebook cell, a reload) replaces its earlier entry."""
        if name in self._entries and (module != self._homes[name] or _top_package(module) == OURS):
            raise PosencError(
                f"The {self.kind} {name!r} is registered twice: by {self.origin(name)}, and now by "
                f"{_origin(module)}. Give one of them another name."
            )
        self._entries[name], self._homes[name] = entry, module
        return entry

    def registered(self) -> Mapping[str, T]:
        """The entries registered so far. No entry point is imported."""
        return self._entries

    def built_in(self) -> list[str]:
        """The names that this package itself registers."""
        return [name for name, module in self._homes.items() if _top_package(module) == OURS]

    def origin(self, name: str) -> Origin:
        return _origin(self._homes[name])

    def resolve(self, name: str, origin: Origin | None) -> T:
        """The entry that a saved record names. `origin` is None for entries of this package."""
        if origin is None and isinstance(name, str) and _top_package(self._homes.get(name, "")) == OURS:
            return self._entries[name]  # even if another package offers an entry of the same name
        if name not in self:
            if origin is None or not isinstance(name, str):
                return self[name]  # raises, and lists the known names
            raise PosencError(self._missing(name, origin))
        found = self.origin(name)
        if origin is None or not found.matches(origin):
            raise PosencError(
                f"The {self.kind} {name!r} of {origin or 'hf_posenc itself'} is needed, but the registered one comes "
                f"from {found}, and they may differ. "
                f"{'Update hf_posenc' if origin is None else 'Install or import the needed one'}."
            )
        return self._entries[name]

    def _missing(self, name: str, origin: Origin) -> str:
        needed = f"The {self.kind} {name!r} of {origin} is needed"
        if name in self.plugins.faults:
            return f"{needed}. {self.plugins.faults[name]}"
        if origin.package is None:
            return f"{needed}, but is not registered. Import that module first, or the one that now defines it."
        try:
            version = metadata.version(origin.package)
        except metadata.PackageNotFoundError:
            used = f" (version {origin.version} was used)" if origin.version else ""
            return f"{needed}, which is not installed{used}: pip install {origin.package}"
        return f"{needed}. Version {version} is installed and offers no entry point for it: import {origin.module}."

    def __getitem__(self, name: str) -> T:
        if isinstance(name, str):
            self.plugins.load(name)
        if not isinstance(name, str) or name not in self._entries:
            known = {*self._entries, *self.plugins.names()}
            raise PosencError(f"Unknown {self.kind} {name!r}.{suggestion(name, list(known))}")
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        try:
            return isinstance(name, str) and self[name] is not None
        except PosencError:
            return False

    def __iter__(self) -> Iterator[str]:
        self.plugins.load_all()
        return iter([name for name in self._entries if name not in self.plugins.faults])

    def items(self) -> ItemsView[str, T]:
        return {name: self._entries[name] for name in self}.items()

    def values(self) -> ValuesView[T]:
        return dict(self.items()).values()

    def __len__(self) -> int:
        return len(list(iter(self)))


@cache
def _entry_points(group: str) -> tuple[metadata.EntryPoint, ...]:
    return tuple(metadata.entry_points(group=group))


def _package(point: metadata.EntryPoint) -> tuple[str, str | None]:
    """The package that an entry point belongs to, and its version."""
    return (point.dist.name, point.dist.version) if point.dist is not None else (_top_package(point.value), None)


@cache
def _origin(module: str) -> Origin:
    groups = (f"{OURS}.schemes", f"{OURS}.families")
    found = {
        _package(p) for group in groups for p in _entry_points(group) if _top_package(p.module) == _top_package(module)
    }
    return Origin(module, *found.pop()) if len(found) == 1 else Origin(module)


def _top_package(module: str) -> str:
    return module.partition(".")[0]


def _normal_name(package: str | None) -> str | None:
    """The name of a package in the form in which pip compares names."""
    return package and re.sub(r"[-_.]+", "-", package).lower()


def _all_text(values: Iterable[object]) -> bool:
    return all(isinstance(value, str) for value in values)
