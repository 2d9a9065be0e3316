"""Names to things: those of this package, and those that other packages and scripts register."""

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
    """Who registered something: a module, and the installed package that it belongs to, if that has an entry point."""

    module: str
    package: str | None = None
    version: str | None = None

    @property
    def built_in(self) -> bool:
        return _top(self.module) == OURS

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
            raise PosencError(f"Who registered something is told by module, package and version, got {data!r}.")
        return cls(**data)

    def matches(self, other: Origin) -> bool:
        """Whether both may be the same code: two modules without a package count as such, whatever their names."""
        return self.built_in == other.built_in and _plain(self.package) == _plain(other.package)


class Plugins:
    """The entry points of one group. Each is named after what its module registers, and imported when asked for."""

    def __init__(self, group: str):
        self.group = group
        self.registries: list[Registry[Any]] = []
        self.faults: dict[str, str] = {}
        """What cannot be had, and why."""
        self._done: set[str] = set()

    def names(self) -> list[str]:
        return sorted({point.name for point in _entry_points(self.group)})

    def load(self, name: str) -> None:
        """Import what a package offers under this name; nothing where none does. Raises if that fails."""
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
        """Import what all packages offer, with a warning for each that fails: the others must not suffer."""
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
        except Exception as error:  # another's code: whatever goes wrong there must not stop us
            return f"{said} and cannot be loaded: {type(error).__name__}: {error}. Update or uninstall it."
        if not any(name in registry.registered() for registry in self.registries):
            return (
                f"{said}, and importing that registers nothing of this name: an entry point is named after what it "
                "registers. Update or uninstall the package."
            )
        return None


class Registry(Mapping[str, T], Generic[T]):
    """Names to things. A wrong name is answered with the right one."""

    def __init__(self, kind: str, plugins: Plugins):
        self.kind, self.plugins = kind, plugins
        plugins.registries.append(self)
        self._entries: dict[str, T] = {}
        self._homes: dict[str, str] = {}

    def add(self, name: str, entry: T, module: str) -> T:
        """Register from a module; one that is run again (a notebook's cell, a reload) replaces what it made before."""
        if name in self._entries and (module != self._homes[name] or _top(module) == OURS):
            raise PosencError(
                f"The {self.kind} {name!r} is registered twice: by {self.origin(name)}, and now by "
                f"{_origin(module)}. Give one of them another name."
            )
        self._entries[name], self._homes[name] = entry, module
        return entry

    def registered(self) -> Mapping[str, T]:
        """What has been registered so far; no package is looked for."""
        return self._entries

    def built_in(self) -> list[str]:
        """The names of what this package brings itself."""
        return [name for name, module in self._homes.items() if _top(module) == OURS]

    def origin(self, name: str) -> Origin:
        return _origin(self._homes[name])

    def resolve(self, name: str, origin: Origin | None) -> T:
        """What a record means by a name: something of this package (None), or what `origin` registered."""
        if origin is None and isinstance(name, str) and _top(self._homes.get(name, "")) == OURS:
            return self._entries[name]  # also where another package offers something else under its name
        if name not in self:
            if origin is None or not isinstance(name, str):
                return self[name]  # which says what is known
            raise PosencError(self._missing(name, origin))
        found = self.origin(name)
        if origin is None or not found.matches(origin):
            raise PosencError(
                f"The {self.kind} {name!r} of {origin or 'hf_posenc itself'} is meant, and the one at hand is that of "
                f"{found}: they may differ. {'Update hf_posenc' if origin is None else 'Install or import the other'}."
            )
        return self._entries[name]

    def _missing(self, name: str, origin: Origin) -> str:
        needed = f"The {self.kind} {name!r} of {origin} is needed"
        if name in self.plugins.faults:
            return f"{needed}. {self.plugins.faults[name]}"
        if origin.package is None:
            return f"{needed}, and nothing has registered it: import that module, or the one where it is now, first."
        try:
            version = metadata.version(origin.package)
        except metadata.PackageNotFoundError:
            used = f" (version {origin.version} was used)" if origin.version else ""
            return f"{needed}, which is not installed{used}: pip install {origin.package}"
        return f"{needed}; its version {version} is installed and does not offer it: import {origin.module} first."

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
    return (point.dist.name, point.dist.version) if point.dist is not None else (_top(point.value), None)


@cache
def _origin(module: str) -> Origin:
    groups = (f"{OURS}.schemes", f"{OURS}.families")
    found = {_package(p) for group in groups for p in _entry_points(group) if _top(p.module) == _top(module)}
    return Origin(module, *found.pop()) if len(found) == 1 else Origin(module)


def _top(module: str) -> str:
    return module.partition(".")[0]


def _plain(package: str | None) -> str | None:
    """A package's name as pip compares them."""
    return package and re.sub(r"[-_.]+", "-", package).lower()


def _all_text(values: Iterable[object]) -> bool:
    return all(isinstance(value, str) for value in values)
