"""Compiled and exported models: one graph for several batches, decoding step by step, any length."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch
from attack.caches import Held
from attack.drawing import Cell, Drawn, Wrong, compare, drawn_cell, drawn_ids, meant
from attack.passes import _left
from torch._dynamo.utils import counters
from transformers import DynamicCache, StaticCache

BACKENDS = ("eager", "aot_eager")


def drawn_compilation(draw: random.Random) -> Drawn:
    """One graph for several batches: whole ones and padded ones, each length another."""
    cell = drawn_cell(draw, ("llama", "gpt2", "bert"))
    dynamic, backend = draw.choice((None, True)), draw.choice(BACKENDS)
    batches = [[drawn_ids(draw, draw.randint(2, 60)) for _ in range(2)] for _ in range(3)]
    case = Drawn("compile", cell, dict(dynamic=dynamic, backend=backend))

    def run(model: Any, cell: Cell) -> None:
        graphs = Graphs()
        judge_batches(torch.compile(model, backend=backend, dynamic=dynamic), cell, batches)
        graphs.count(case)

    case.run = run
    return case


def drawn_inductor(draw: random.Random) -> Drawn:
    """Machine code, on one layer: two batches of one graph, or a graph of one length."""
    cell = drawn_cell(draw, ("llama", "llama", "gpt2", "bert"))
    cell = replace(cell, layers=2 if cell.scheme == "plan" else 1)
    dynamic, kept = draw.random() < 0.6, cell.kind != "bert" and draw.random() < 0.3
    width = draw.randint(34, 60)  # past what the model was trained at
    widths = (width, draw.randint(4, 60)) if dynamic else (width, width)
    batches = [[drawn_ids(draw, width), drawn_ids(draw, draw.randint(2, width))] for width in widths]
    case = Drawn("inductor", cell, dict(dynamic=dynamic, decodes=kept))

    def run(model: Any, cell: Cell) -> None:
        graphs = Graphs()
        compiled = torch.compile(model, dynamic=dynamic)
        if kept:
            past = StaticCache(config=model.config, max_cache_len=96)
            held = Held(cell, model, past, batches[0], random.Random(0))
            held.model = compiled
            held.feed(1)
            held.feed(1)
        else:
            judge_batches(compiled, cell, batches)
        graphs.count(case)

    case.run = run
    return case


class Graphs:
    """How often torch compiled since, so that what it runs as it is does not pass for a graph."""

    def __init__(self) -> None:
        torch._dynamo.reset()
        counters.clear()

    def count(self, case: Drawn) -> None:
        """For the report; a model that was never compiled says nothing about compiled ones."""
        graphs = counters["stats"]["unique_graphs"]
        if not graphs:
            raise Wrong("nothing was compiled")
        case.traits |= dict(graphs="one" if graphs == 1 else "several", in_pieces=bool(counters["graph_break"]))


def judge_batches(compiled: Any, cell: Cell, batches: list[list[torch.Tensor]]) -> None:
    for rows in batches:
        inputs, expected = _left(cell, rows, 0.0)
        with torch.no_grad():
            found = compiled(**inputs).logits
        for row, (where, told) in enumerate(expected()):
            compare(cell, found[row, where], told, f"row {row}")


def drawn_decoding(draw: random.Random) -> Drawn:
    """A prompt that is read as it is, left-padded or not, and steps that a graph takes, over either cache."""
    cell = drawn_cell(draw, ("llama", "gpt2"))
    dynamic, backend, static = draw.choice((None, True)), draw.choice(BACKENDS), draw.random() < 0.6
    rows = [drawn_ids(draw, draw.randint(1, 60)) for _ in range(draw.randint(1, 2))]
    case = Drawn("decode", cell, dict(dynamic=dynamic, backend=backend, static=static))
    seed = draw.random()

    def run(model: Any, cell: Cell) -> None:
        graphs = Graphs()
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
        graphs.count(case)

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
