"""Schemes and families from outside, made known to what runs over all of them."""

import sys
from importlib import import_module
from pathlib import Path


def register_from(name: str) -> None:
    """Import a module that registers something: by its name, or by the path of its file."""
    if name.endswith(".py"):
        file = Path(name).resolve(strict=True)
        sys.path.insert(0, str(file.parent))
        name = file.stem
    import_module(name)
