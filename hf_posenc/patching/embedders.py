"""Sentence embedders: the transformers model inside a SentenceTransformer, and the length that it cuts texts at.

sentence-transformers is an optional dependency, so its class is recognised by name here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from ..errors import UnsupportedModel
from .edits import Swap

if TYPE_CHECKING:
    from torch import nn

LIBRARY, KIND = "sentence_transformers", "SentenceTransformer"


def is_embedder(model: Any) -> bool:
    """Whether this is a SentenceTransformer. The library need not be installed."""
    return any(c.__name__ == KIND and c.__module__.partition(".")[0] == LIBRARY for c in type(model).__mro__)


def inner_model(model: Any) -> Any:
    """The transformers model inside a SentenceTransformer; any other object itself."""
    if not is_embedder(model):
        return model
    found: list[PreTrainedModel] = []
    _collect(model, found)
    if len(found) != 1:
        inside = ", ".join(type(one).__name__ for one in found) or "none"
        raise UnsupportedModel(
            f"A {KIND} with one transformers model inside is wanted, and this one has {len(found)} ({inside}). "
            "Patch the transformers models inside one by one, and set max_seq_length by hand."
        )
    return found[0]


def _collect(module: nn.Module, found: list[PreTrainedModel]) -> None:
    for child in module.children():
        if not isinstance(child, PreTrainedModel):
            _collect(child, found)
        elif not any(child is one for one in found):
            found.append(child)


def length_edit(model: Any, length: int) -> Swap:
    """Lets a SentenceTransformer read so many tokens: its `max_seq_length` is that of its tokenizer."""
    tokenizer = getattr(model, "tokenizer", None)
    if not hasattr(tokenizer, "model_max_length"):
        raise UnsupportedModel(
            f"This {KIND} has no tokenizer of transformers ({type(tokenizer).__name__}), so that its maximum length "
            "cannot be set. Patch the transformers model inside it, and set the length by hand."
        )
    return Swap(tokenizer, "model_max_length", length)
