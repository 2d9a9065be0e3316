"""One file per scheme. A file that is here is registered, tested, listed and documented unasked."""

from importlib import import_module
from pkgutil import iter_modules

from .base import SCHEMES, Scheme, register_scheme, scheme_from

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["SCHEMES", "Scheme", "register_scheme", "scheme_from"]
