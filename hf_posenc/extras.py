"""Optional packages, by the extra that installs them.

Code that needs one calls `require` or `require_all`, which raise an error with the install command if it is missing.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from .errors import MissingPackage

EXTRAS = {
    "cli": ("typer", "rich", "tqdm", "psutil"),
    "adapters": ("accelerate", "peft"),
    "train": ("accelerate", "peft", "datasets", "pydantic", "yaml", "numpy", "rich", "tqdm", "psutil"),
    "eval": ("lm_eval", "numpy", "matplotlib", "rich", "tqdm", "psutil"),
    "export": ("gguf", "numpy"),
    "onnx": ("onnx", "onnxscript", "onnxruntime"),
    "embed": ("sentence_transformers", "mteb"),
}
"""The packages that each extra of pyproject.toml installs, by their import names. A test compares the two."""


def require(package: str, extra: str, what: str) -> Any:
    """Import a package. If it is missing, raise an error that says how to install it; `what` is what needs it."""
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        raise missing_package(error.name or package, extra, what) from None


def require_all(extra: str, what: str) -> None:
    """Raise for the first missing package of an extra. Nothing is imported."""
    for package in EXTRAS[extra]:
        if find_spec(package) is None:
            raise missing_package(package, extra, what)


def missing_package(package: str, extra: str, what: str) -> MissingPackage:
    return MissingPackage(f"{what} needs {package}, which is not installed: {install_command(extra)}")


def install_command(extra: str) -> str:
    """The command that installs an extra, from a package index and from a clone."""
    return f"pip install 'hf-posenc[{extra}]' (in a clone of the project: pip install '.[{extra}]')."
