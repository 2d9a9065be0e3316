"""Swap how a Hugging Face model knows positions, and back."""

from .checkpoints.on_disk import describe_checkpoint, patch_checkpoint
from .checkpoints.save_load import load, merge, save
from .errors import PosencError, UnsupportedCell, UnsupportedModel
from .families import Family, register_family
from .patching.checks import check_model
from .patching.describe import Description, describe
from .patching.growth import new_rows
from .patching.lengths import reach, trained_length
from .patching.live import is_patched
from .patching.patch import patch_model, set_rendering, unpatch_model
from .schemes import SCHEMES, Scheme, register_scheme

__version__ = "0.1.0"
__all__ = [
    "SCHEMES",
    "Description",
    "Family",
    "PosencError",
    "Scheme",
    "UnsupportedCell",
    "UnsupportedModel",
    "check_model",
    "describe",
    "describe_checkpoint",
    "is_patched",
    "load",
    "merge",
    "new_rows",
    "patch_checkpoint",
    "patch_model",
    "reach",
    "register_family",
    "register_scheme",
    "save",
    "set_rendering",
    "trained_length",
    "unpatch_model",
]
