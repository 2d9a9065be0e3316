"""Public names of a package that are imported when they are first used, so that unused ones cost nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazy_names(package: str, homes: Mapping[str, Sequence[str]], rooms: Sequence[str] = ()) -> Callable[[str], Any]:
    """The `__getattr__` of a package. `homes`: the names that each module defines. `rooms`: submodules to import."""
    where = {name: module for module, names in homes.items() for name in names}

    def find(name: str) -> Any:
        if name in where:
            value = getattr(import_module(where[name], package), name)
            setattr(sys.modules[package], name, value)  # found directly from now on
            return value
        if name in rooms:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find
