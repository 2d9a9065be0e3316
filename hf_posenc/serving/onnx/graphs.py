"""What is traced: a model with its inputs and outputs as ONNX names them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from transformers import DynamicCache

FILE = "model.onnx"
BATCH, LENGTH, PAST = 3, 5, 7
"""Sizes to trace with; no two alike, and none of them 0 or 1, which a tracer takes for good."""


@dataclass(frozen=True)
class Graph:
    """A module to trace, with arguments and the names that they and the outputs get."""

    module: nn.Module
    arguments: tuple[Any, ...]
    shapes: tuple[Any, ...]
    inputs: list[str]
    outputs: list[str]


class Whole(nn.Module):
    """A model that reads whole texts."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model
        self.options = {"use_cache": False} if getattr(model.config, "use_cache", None) is not None else {}

    def forward(self, input_ids: Tensor) -> Tensor:
        output: Any = self.model(input_ids=input_ids, **self.options)
        logits: Tensor = output[0]
        return logits


class Cached(nn.Module):
    """A decoder that is given the keys and values of what it read before, and gives back those of all."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, past: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, ...]:
        cache: Any = DynamicCache()
        for layer, (key, value) in enumerate(past):
            cache.update(key, value, layer)
        output: Any = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
        )
        present = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
        return (output.logits, *present)


def whole_graph(model: Any) -> Graph:
    """Of texts without padding, which a graph without a mask reads one length at a time."""
    ids = torch.ones(BATCH, LENGTH + PAST, dtype=torch.long)
    return Graph(Whole(model), (ids,), ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},), ["input_ids"], ["logits"])


def cached_graph(model: Any) -> Graph:
    config = model.config.get_text_config()
    with torch.no_grad():
        tried = model(torch.ones(1, 1, dtype=torch.long), use_cache=True).past_key_values
    sizes = [(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]) for layer in tried.layers]
    assert len(sizes) == config.num_hidden_layers
    past = [(torch.randn(BATCH, h, PAST, k), torch.randn(BATCH, h, PAST, v)) for h, k, v in sizes]
    positions = torch.arange(PAST, PAST + LENGTH).expand(BATCH, -1)
    ids, mask = torch.ones(BATCH, LENGTH, dtype=torch.long), torch.ones(BATCH, PAST + LENGTH, dtype=torch.long)
    batch, length, before, total = Dim("batch"), Dim("length"), Dim("past_length"), Dim("total_length")
    kept = {0: batch, 2: before}
    shapes = (
        {0: batch, 1: length},
        {0: batch, 1: total},
        {0: batch, 1: length},
        [(dict(kept), dict(kept)) for _ in sizes],
    )
    names = [f"{index}.{what}" for index in range(len(sizes)) for what in ("key", "value")]
    inputs = ["input_ids", "attention_mask", "position_ids", *(f"past_key_values.{name}" for name in names)]
    return Graph(
        Cached(model), (ids, mask, positions, past), shapes, inputs, ["logits", *(f"present.{name}" for name in names)]
    )
