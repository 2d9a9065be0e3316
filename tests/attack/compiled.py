"""Compiled and exported models: one graph for several batches, decoding step by step, any length."""

from __future__ import annotations

import random
from typing import Any

import torch
from attack.caches import Held
from attack.drawing import Cell, Drawn, compare, drawn_cell, drawn_ids, meant
from attack.passes import _left
from transformers import DynamicCache, StaticCache

BACKENDS = ("eager", "aot_eager")


def drawn_compilation(draw: random.Random, backends: tuple[str, ...] = BACKENDS) -> Drawn:
    """One graph for several batches: whole ones and padded ones, each length another."""
    cell = drawn_cell(draw, ("llama", "gpt2", "bert"))
    dynamic, backend = draw.choice((None, True)), draw.choice(backends)
    batches = [[drawn_ids(draw, draw.randint(2, 60)) for _ in range(2)] for _ in range(3)]
    case = Drawn("compile", cell, dict(dynamic=dynamic, backend=backend))

    def run(model: Any, cell: Cell) -> None:
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=backend, dynamic=dynamic)
        for rows in batches:
            inputs, expected = _left(cell, rows, 0.0)
            with torch.no_grad():
                found = compiled(**inputs).logits
            for row, (where, told) in enumerate(expected()):
                compare(cell, found[row, where], told, f"row {row}")

    case.run = run
    return case


def drawn_inductor(draw: random.Random) -> Drawn:
    made = draw.choice((drawn_compilation, drawn_decoding))
    return made(draw, ("inductor",))


def drawn_decoding(draw: random.Random, backends: tuple[str, ...] = BACKENDS) -> Drawn:
    """A prompt that is read as it is, left-padded or not, and steps that a graph takes, over either cache."""
    cell = drawn_cell(draw, ("llama", "gpt2"))
    dynamic, backend, static = draw.choice((None, True)), draw.choice(backends), draw.random() < 0.6
    rows = [drawn_ids(draw, draw.randint(1, 60)) for _ in range(draw.randint(1, 2))]
    case = Drawn("decode", cell, dict(dynamic=dynamic, backend=backend, static=static))
    seed = draw.random()

    def run(model: Any, cell: Cell) -> None:
        torch._dynamo.reset()
        past = StaticCache(config=model.config, max_cache_len=96) if static else DynamicCache(config=model.config)
        held = Held(cell, model, past, rows, random.Random(seed))
        held.model = torch.compile(model, backend=backend, dynamic=dynamic)
        for count in (1, 1, 3, 1):
            held.feed(count)
        if static:
            held.past.reset()
            held.model = model
            held.start([row[: 1 + len(row) // 2] for row in rows])
            held.model = torch.compile(model, backend=backend, dynamic=dynamic)
            held.feed(1)

    case.run = run
    return case


class Logits(torch.nn.Module):
    def __init__(self, model: Any, causal: bool):
        super().__init__()
        self.model, self.given = model, {"use_cache": False} if causal else {}

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids, **self.given).logits
        return logits


def drawn_export(draw: random.Random) -> Drawn:
    """`torch.export`, traced at one length and asked at others."""
    cell = drawn_cell(draw, ("llama", "qwen3", "gpt2", "bert"))
    lengths, strict = [draw.randint(2, 90) for _ in range(4)], draw.random() < 0.2
    case = Drawn("export", cell, dict(strict=strict))

    def run(model: Any, cell: Cell) -> None:
        torch._dynamo.reset()
        anyhow = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
        traced = torch.stack([drawn_ids(random.Random(0), lengths[0]) for _ in range(3)])
        whole = Logits(model, cell.kind != "bert")
        made = torch.export.export(whole, (traced,), dynamic_shapes=(anyhow,), strict=strict).module()
        for length in lengths:
            ids = drawn_ids(random.Random(length), length)
            with torch.no_grad():
                compare(cell, made(ids[None])[0], meant(cell, ids), f"{length} tokens, traced at {lengths[0]}")

    case.run = run
    return case
