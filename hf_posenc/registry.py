"""Registries that answer a wrong name with the right one."""

from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from .errors import PosencError, suggestion

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """Names to things, filled by the files that define the things."""

    def __init__(self, kind: str):
        self.kind = kind
        self._entries: dict[str, T] = {}

    def add(self, name: str, entry: T) -> T:
        if name in self._entries:
            raise RuntimeError(f"the {self.kind} {name!r} is registered twice")
        self._entries[name] = entry
        return entry

    def __getitem__(self, name: str) -> T:
        if not isinstance(name, str) or name not in self._entries:
            raise PosencError(f"Unknown {self.kind} {name!r}.{suggestion(name, list(self._entries))}")
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
