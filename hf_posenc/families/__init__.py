"""One file per family or kin. A file that is here is registered, tested, listed and documented unasked."""

from importlib import import_module
from pkgutil import iter_modules

from .base import FAMILIES, IMAGE_FAMILIES, Family, ImageFamily, register_family
from .places import Group, Places, Stack, places
from .towers import ImagePlaces, image_family, image_places

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = [
    "FAMILIES",
    "IMAGE_FAMILIES",
    "Family",
    "Group",
    "ImageFamily",
    "ImagePlaces",
    "Places",
    "Stack",
    "image_family",
    "image_places",
    "places",
    "register_family",
]
