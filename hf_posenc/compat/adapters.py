"""PEFT: what it leaves on a model. Nothing here imports it but what needs its own tables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def unwrap_copies(module: Any) -> Any:
    """The module that PEFT keeps trained copies of, behind a wrapper; any other as it is."""
    return getattr(module, "original_module", module)


def active_copy(module: Any) -> Any:
    """The copy of a module that PEFT trains and uses; a module without any as it is."""
    while hasattr(module, "modules_to_save"):
        module = module.modules_to_save[module.active_adapters[0]]
    return module


def knows_embeddings(names: Iterable[str]) -> bool:
    """Whether any of these modules is one that PEFT knows to be an end of a model, and keeps tied to the other."""
    from peft.utils.constants import EMBEDDING_LAYER_NAMES

    return any(name in EMBEDDING_LAYER_NAMES for name in names)
