"""Relative terms that look at content: vectors for distances, which queries and keys are multiplied with.

Shaw's terms, those of Transformer-XL and of DeBERTa differ in which vectors there are, and in which of them a distance
takes; how scores are made of them is the same for all (`runtime/relative.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from .biases import Bias

Rows = Callable[[Tensor], Tensor]
"""The row of a table for each `key - query`."""


@dataclass(frozen=True)
class Terms:
    """What one layer adds to q k^T before it is scaled."""

    rows: Rows
    keys: Tensor
    """What queries are multiplied with, (heads or 1, rows, channels)."""
    queries: Tensor | None = None
    """What keys are multiplied with."""
    query_rows: Rows | None = None
    """The rows of `queries`, where those are others."""
    values: Tensor | None = None
    """What is added to the values, (heads or 1, rows, channels)."""
    content: Tensor | None = None
    """Added to queries where they meet keys, (heads, channels)."""
    position: Tensor | None = None
    """Added to queries where they meet `keys`."""
    reach: int | None = None
    """How many tokens back all distances begin to share a row; None where each has its own."""
    scale: float = 1.0
    """What scores are multiplied by beside the model's own scale."""


class RelativeTerms(Bias):
    """Terms for each layer that is patched. Its parameters are best cast with the model: they meet q and k."""

    of_terms = True
    of_distance = True

    def terms(self, layer: int, first: int, last: int) -> Terms:
        """Those of a layer, for distances `key - query` from `first` to `last`."""
        raise NotImplementedError(f"{type(self).__name__} must define terms(layer, first, last)")

    def forward(self, layer: int, first: int, last: int) -> Terms:  # type: ignore[override]
        return self.terms(layer, first, last)
