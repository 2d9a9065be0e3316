"""Registries that answer a wrong name with the right one, and the errors of this package."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Generic, TypeVar

T = TypeVar("T")


class PosencError(ValueError):
    """A request that cannot be met. The model is as it was before."""


class UnsupportedModel(PosencError):
    """The model is of a kind that this package cannot patch."""


class UnsupportedCell(PosencError):
    """This scheme has no meaning, or no exact rendering, on this model."""


def suggestion(name: object, known: list[str]) -> str:
    """The tail of an error message about an unknown name."""
    close = get_close_matches(str(name), known, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"{hint} Known: {', '.join(sorted(known))}."


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
