"""PEFT: the wrappers that it puts around modules. PEFT itself is imported only where its own tables are needed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def unwrap_copies(module: Any) -> Any:
    """The original module inside the wrapper in which PEFT keeps trained copies; any other module unchanged."""
    return getattr(module, "original_module", module)


def active_copy(module: Any) -> Any:
    """The copy of a module that PEFT trains and uses; a module without copies unchanged."""
    while hasattr(module, "modules_to_save"):
        module = module.modules_to_save[module.active_adapters[0]]
    return module


def knows_embeddings(names: Iterable[str]) -> bool:
    """Whether PEFT knows one of these module names as an input or output embedding, and keeps the two tied."""
    from peft.utils.constants import EMBEDDING_LAYER_NAMES

    return any(name in EMBEDDING_LAYER_NAMES for name in names)
