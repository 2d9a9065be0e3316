"""The tokenizer in the folder of a checkpoint."""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer

from ..models import model_path
from .hub import offline


def tokenizer_of(*paths: str | None) -> Any:
    """The tokenizer at the first of these places that has one."""
    for path in filter(None, paths):
        try:
            return AutoTokenizer.from_pretrained(model_path(path), **offline(model_path(path), {}))
        except (OSError, ValueError, KeyError):  # a directory without one
            continue
    return None
