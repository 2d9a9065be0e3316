"""Relative terms: vectors for distances, which are multiplied with queries and keys and added to scores.

The terms of Shaw, Transformer-XL and DeBERTa differ in the vectors that they have and in the vector that a distance
takes. Scores are computed from them in the same way for all (`runtime/relative.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from .biases import Bias

Rows = Callable[[Tensor], Tensor]
"""Gives the row of a table for each distance `key - query`."""


@dataclass(frozen=True)
class Terms:
    """What one layer adds to q k^T before it is scaled.

    With d the distance: (query + `position`) `keys`[d] + key `queries`[d] + `content` key.
    """

    rows: Rows
    keys: Tensor
    """Vectors that are multiplied with queries, (heads or 1, rows, channels)."""
    queries: Tensor | None = None
    """Vectors that are multiplied with keys, of the same shape."""
    query_rows: Rows | None = None
    """The rows of `queries`, if they differ from `rows`."""
    values: Tensor | None = None
    """Vectors that are added to the values, (heads or 1, rows, channels)."""
    content: Tensor | None = None
    """Added to queries before they are multiplied with keys, (heads, channels)."""
    position: Tensor | None = None
    """Added to queries before they are multiplied with `keys`, (heads, channels)."""
    reach: int | None = None
    """All keys that are at least this many tokens before the query share a row; None if each distance has its own."""
    scale: float = 1.0
    """Multiplies scores, on top of the model's own scale."""


class RelativeTerms(Bias):
    """Relative terms of every patched layer. Its parameters are usually cast with the model, as q and k are."""

    of_terms = True
    of_distance = True

    def terms(self, layer: int, first: int, last: int) -> Terms:
        """The terms of a layer, for distances `key - query` from `first` to `last`."""
        raise NotImplementedError(f"{type(self).__name__} must define terms(layer, first, last)")

    def forward(self, layer: int, first: int, last: int) -> Terms:  # type: ignore[override]
        return self.terms(layer, first, last)
