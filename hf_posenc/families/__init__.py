"""One file for each family of models. Every file in this folder is registered, tested, listed and documented."""

from importlib import import_module
from pkgutil import iter_modules

from .base import FAMILIES, Family, family_of, register_family
from .places import Group, Places, Stack, places

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["FAMILIES", "Family", "Group", "Places", "Stack", "family_of", "places", "register_family"]
