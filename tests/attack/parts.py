"""Evaluation in parts: the losses of tokens that a body reads over a cache and a head sees in slices."""

from __future__ import annotations

import random
from typing import Any

import torch
from attack.drawing import Cell, Drawn, compare, drawn_block, drawn_cell, drawn_ids, meant

from hf_posenc.evaluation import token_losses


def drawn_parts(draw: random.Random) -> Drawn:
    cell = drawn_cell(draw, ("llama", "qwen3", "gpt2"))
    length, count = draw.randint(2, cell.longest), draw.randint(1, 3)
    rows = torch.stack([drawn_ids(draw, length) for _ in range(count)])
    step = draw.choice((None, draw.randint(1, length), draw.randint(1, 8)))
    last, chunk = draw.choice((None, draw.randint(1, length - 1))), draw.randint(1, 40)
    traits = dict(in_parts=step is not None, last=last is not None)
    case = Drawn("parts", cell, traits, block=drawn_block(draw))

    def run(model: Any, cell: Cell) -> None:
        found = token_losses(model, rows, last=last, chunk=chunk, step=step)
        told = torch.stack([-meant(cell, row)[:-1].log_softmax(-1).gather(1, row[1:, None])[:, 0] for row in rows])
        compare(cell, found, told[:, -found.shape[1] :], f"step {step}, chunk {chunk}, last {last}")

    case.run = run
    return case
