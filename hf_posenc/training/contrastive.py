"""Contrastive training: pairs of texts cut from one document, and the loss on their embeddings."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .rows import Row, positions_of

TEMPERATURE = 0.05
QUERY = 64
"""Tokens of a query."""


@dataclass(frozen=True)
class Pairs:
    """The inverse cloze task: a stretch of text is the query, the text around it the document."""

    opening: Sequence[int]
    closing: Sequence[int]
    query: int = QUERY
    kept: float = 0.5
    """How often the document keeps the stretch, so that words are matched too, not only meaning."""

    def inputs(self, row: Row, rng: random.Random) -> dict[str, Tensor]:
        ids = list(row.ids)
        size = min(self.query, len(ids) // 2)
        start = rng.randrange(len(ids) - size + 1)
        query = ids[start : start + size]
        # Equally long in both cases, so that nothing is padded.
        document = ids[:-size] if rng.random() < self.kept and start + size <= len(ids) - size else None
        document = document or ids[:start] + ids[start + size :]
        made = {"input_ids": document, "query_ids": query}
        inputs = {name: torch.tensor([*self.opening, *part, *self.closing]) for name, part in made.items()}
        inputs["position_ids"] = torch.tensor(positions_of(row)[: len(inputs["input_ids"])])
        return inputs


def mean_states(model: Any, **inputs: Tensor) -> Tensor:
    """Unit vectors: the mean of the last hidden states, as in sentence embedders. Rows have no padding."""
    return F.normalize(model(**inputs).last_hidden_state.float().mean(1), dim=-1)


def contrastive_loss(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Each query must find its document among those of the batch, and each document its query."""
    queries = mean_states(model, input_ids=inputs["query_ids"])
    documents = mean_states(model, input_ids=inputs["input_ids"], position_ids=inputs["position_ids"])
    scores = queries @ documents.T / TEMPERATURE
    own = torch.arange(len(scores), device=scores.device)
    return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2
