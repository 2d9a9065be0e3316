"""Swap how a Hugging Face model knows positions, and back.

Names are imported when they are first used: `import hf_posenc` alone, and the command line's help, load neither torch
nor transformers.
"""

from typing import TYPE_CHECKING

from .lazy import lazy_names
from .version import __version__

if TYPE_CHECKING:
    from .checkpoints.load import load
    from .checkpoints.merge import merge
    from .checkpoints.on_disk import describe_checkpoint, patch_checkpoint
    from .checkpoints.reseal import reseal
    from .checkpoints.save import save
    from .errors import MissingPackage, PosencError, UnsupportedCell, UnsupportedModel, UntrainedWarning
    from .families import Family, register_family
    from .patching.checks import check_model
    from .patching.describe import Description, describe
    from .patching.growth import new_rows
    from .patching.lengths import reach, trained_length
    from .patching.patch import patch_model, set_rendering, unpatch_model
    from .patching.patch_state import is_patched
    from .schemes import SCHEMES, Scheme, register_scheme
    from .serving.arguments import serve_args
    from .serving.doctor.examine import doctor
    from .serving.verify import verify

__all__ = [
    "SCHEMES",
    "Description",
    "Family",
    "MissingPackage",
    "PosencError",
    "Scheme",
    "UnsupportedCell",
    "UnsupportedModel",
    "UntrainedWarning",
    "__version__",
    "check_model",
    "describe",
    "describe_checkpoint",
    "doctor",
    "is_patched",
    "load",
    "merge",
    "new_rows",
    "patch_checkpoint",
    "patch_model",
    "reach",
    "register_family",
    "register_scheme",
    "reseal",
    "save",
    "serve_args",
    "set_rendering",
    "trained_length",
    "unpatch_model",
    "verify",
]
_HOMES = {
    ".checkpoints.on_disk": ("describe_checkpoint", "patch_checkpoint"),
    ".checkpoints.reseal": ("reseal",),
    ".checkpoints.merge": ("merge",),
    ".checkpoints.load": ("load",),
    ".checkpoints.save": ("save",),
    ".errors": ("MissingPackage", "PosencError", "UnsupportedCell", "UnsupportedModel", "UntrainedWarning"),
    ".families": ("Family", "register_family"),
    ".patching.checks": ("check_model",),
    ".patching.describe": ("Description", "describe"),
    ".patching.growth": ("new_rows",),
    ".patching.lengths": ("reach", "trained_length"),
    ".patching.patch_state": ("is_patched",),
    ".patching.patch": ("patch_model", "set_rendering", "unpatch_model"),
    ".schemes": ("SCHEMES", "Scheme", "register_scheme"),
    ".serving.arguments": ("serve_args",),
    ".serving.doctor.examine": ("doctor",),
    ".serving.verify": ("verify",),
}
"""Where each public name is defined; a test holds it against what type checkers read above."""
__getattr__ = lazy_names(__name__, _HOMES, rooms=("errors", "evaluation", "schemes", "training"))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
