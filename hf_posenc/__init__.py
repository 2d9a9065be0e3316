"""Swap how a Hugging Face model knows positions, and back."""

from .checkpoints.reseal import reseal
from .checkpoints.save_load import load, merge, save
from .errors import PosencError, UnsupportedCell, UnsupportedModel
from .patching.describe import Description, check_model, describe
from .patching.growth import new_rows
from .patching.patch import is_patched, patch_model, set_rendering, unpatch_model
from .schemes import SCHEMES, Scheme

__version__ = "0.1.0"
__all__ = [
    "SCHEMES",
    "Description",
    "PosencError",
    "Scheme",
    "UnsupportedCell",
    "UnsupportedModel",
    "check_model",
    "describe",
    "is_patched",
    "load",
    "merge",
    "new_rows",
    "patch_model",
    "reseal",
    "save",
    "set_rendering",
    "unpatch_model",
]
