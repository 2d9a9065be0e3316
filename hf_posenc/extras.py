"""Packages that only parts of this one need: imported when such a part is used, and named when they are absent."""

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
"""What each extra of pyproject.toml brings, by the names that are imported; a test compares the two."""


def require(package: str, extra: str, what: str) -> Any:
    """The package, imported; an error that says how to install it where it is missing."""
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        raise missing_package(error.name or package, extra, what) from None


def require_all(extra: str, what: str) -> None:
    """Raise for the first package of an extra that is missing, without importing any."""
    for package in EXTRAS[extra]:
        if find_spec(package) is None:
            raise missing_package(package, extra, what)


def missing_package(package: str, extra: str, what: str) -> MissingPackage:
    return MissingPackage(f"{what} needs {package}, which is not installed: {install_command(extra)}")


def install_command(extra: str) -> str:
    """How an extra is installed, from a package index or from a clone."""
    return f"pip install 'hf-posenc[{extra}]' (in a clone of the project: pip install '.[{extra}]')."
