"""Swap how a Hugging Face model knows positions, and back.

Names are imported when they are first used: `import hf_posenc` alone, and the command line's help, load neither torch
nor transformers.
"""

from typing import TYPE_CHECKING

from .lazy import lazy_names
from .version import __version__

if TYPE_CHECKING:
    from .checkpoints.save_load import load, merge, save
    from .errors import MissingPackage, PosencError, UnsupportedCell, UnsupportedModel, UntrainedWarning
    from .patching.describe import Description, check_model, describe
    from .patching.growth import new_rows
    from .patching.patch import is_patched, patch_model, set_rendering, unpatch_model
    from .schemes import SCHEMES, Scheme

__all__ = [
    "SCHEMES",
    "Description",
    "MissingPackage",
    "PosencError",
    "Scheme",
    "UnsupportedCell",
    "UnsupportedModel",
    "UntrainedWarning",
    "__version__",
    "check_model",
    "describe",
    "is_patched",
    "load",
    "merge",
    "new_rows",
    "patch_model",
    "save",
    "set_rendering",
    "unpatch_model",
]
_HOMES = {
    ".checkpoints.save_load": ("load", "merge", "save"),
    ".errors": ("MissingPackage", "PosencError", "UnsupportedCell", "UnsupportedModel", "UntrainedWarning"),
    ".patching.describe": ("Description", "check_model", "describe"),
    ".patching.growth": ("new_rows",),
    ".patching.patch": ("is_patched", "patch_model", "set_rendering", "unpatch_model"),
    ".schemes": ("SCHEMES", "Scheme"),
}
"""Where each public name is defined; a test holds it against what type checkers read above."""
__getattr__ = lazy_names(__name__, _HOMES, rooms=("errors", "evaluation", "schemes", "training"))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
