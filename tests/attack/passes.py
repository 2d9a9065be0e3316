"""One pass over rows: padded, packed, with masks that look ahead, at positions that jump."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import torch
from attack.drawing import ABSOLUTE, DTYPES, Cell, Drawn, compare, drawn_block, drawn_cell, drawn_ids, meant, padded
from torch import Tensor

MASKS = (
    *("none", "left", "left_untold", "right", "packed", "packed_4d", "prefix", "prefix_float", "jumping"),
    *("holes", "tree"),
)


def drawn_pass(draw: random.Random) -> Drawn:
    cell = drawn_cell(draw, ("llama", "qwen3", "gpt2", "bert"), ("float32",) * 3 + tuple(DTYPES))
    causal = cell.kind != "bert"
    mask = draw.choice(MASKS if causal else ("none", "left", "right", "holes"))
    grad, cached = draw.random() < 0.2, causal and draw.random() < 0.3 and not mask.startswith("packed")
    autocast = cell.dtype == "float32" and draw.random() < 0.1
    rows = [drawn_ids(draw, draw.randint(1, cell.longest)) for _ in range(draw.randint(1, 3))]
    case = Drawn(
        "pass", cell, dict(mask=mask, grad=grad, use_cache=cached, autocast=autocast), block=drawn_block(draw)
    )
    chosen = draw.random()

    def run(model: Any, cell: Cell) -> None:
        inputs, expected = PASSES[mask](cell, rows, chosen)
        if causal:
            inputs["use_cache"] = cached
        about = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
        with torch.set_grad_enabled(grad), about:
            found = model(**inputs).logits.detach()
        for row, (where, told) in enumerate(expected()):
            compare(cell, found[row, where], told, f"row {row}", "bfloat16" if autocast else None)

    case.run = run
    return case


def _same_length(cell, rows, chosen):
    n = len(rows[0])
    rows = [row[:n] if len(row) >= n else torch.cat([row, rows[0][len(row) :]]) for row in rows]
    return {"input_ids": torch.stack(rows)}, lambda: [(slice(None), meant(cell, row)) for row in rows]


def _jumping(cell, rows, chosen):
    """Positions that leave some out: a text of which a part is not there."""
    row = rows[0][: max(len(rows[0]) // 2, 1)]
    at = torch.arange(len(row))
    gap = int(chosen * (cell.longest - len(row)))
    at = at + (at >= len(row) // 2) * gap
    inputs = {"input_ids": row[None], "position_ids": at[None], "attention_mask": torch.ones(1, len(row)).long()}
    return inputs, lambda: [(slice(None), meant(cell, row, at))]


def _left(cell, rows, chosen, told=True):
    ids, mask = padded(rows, left=True)
    width = ids.shape[1]
    inputs = {"input_ids": ids, "attention_mask": mask}
    if told:
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    return inputs, lambda: [(slice(width - len(row), width), meant(cell, row)) for row in rows]


def _left_untold(cell, rows, chosen):
    """Nobody says where the text begins but the mask. The unpatched model counts padding as well."""
    if cell.kind in ("gpt2", "bert") or cell.scheme in ABSOLUTE or cell.heated is not None:
        return _left(cell, rows, chosen)
    return _left(cell, rows, chosen, told=False)


def _right(cell, rows, chosen):
    ids, mask = padded(rows, left=False)
    return (
        {"input_ids": ids, "attention_mask": mask},
        lambda: [(slice(len(row)), meant(cell, row)) for row in rows],
    )


def four_dimensions(cell: Cell, visible: Tensor, numbers: bool) -> Tensor:
    """A mask as it goes straight to attention. transformers' eager attention adds it, so that it must be numbers."""
    mask = visible[None, None]
    if not numbers and cell.kernel == "sdpa":
        return mask
    dtype = DTYPES[cell.dtype]
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def _packed(cell, rows, chosen, four=False):
    ids, places = torch.cat(rows)[None], torch.cat([torch.arange(len(row)) for row in rows])[None]
    inputs = {"input_ids": ids, "position_ids": places}
    if four:
        of = torch.cat([torch.full((len(row),), n) for n, row in enumerate(rows)])
        visible = (of[:, None] == of) & torch.ones(len(of), len(of)).tril().bool()
        inputs["attention_mask"] = four_dimensions(cell, visible, numbers=False)
    return inputs, lambda: [(slice(None), torch.cat([meant(cell, row) for row in rows]))]


def _prefix(cell, rows, chosen, numbers=False):
    row = rows[0]
    n, first = len(row), 1 + int(chosen * len(row))
    visible = torch.ones(n, n).tril().bool()
    visible[:first, :first] = True
    mask = four_dimensions(cell, visible, numbers)
    at = torch.arange(n)[None]

    def expected():
        yield slice(None), meant(cell, row, None, visible, ahead=True)

    return {"input_ids": row[None], "attention_mask": mask, "position_ids": at}, expected


def _holes(cell, rows, chosen):
    """Padding between tokens, as behind virtual tokens: what is left is a text."""
    draw, real = random.Random(chosen), []
    for row in rows:
        kept = torch.tensor([draw.random() < 0.7 for _ in row])
        kept[draw.randrange(len(row))] = True
        real.append(kept)
    ids, mask = padded(rows, left=False)
    for row, kept in enumerate(real):
        mask[row, : len(kept)] = kept
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    texts = [row[kept] for row, kept in zip(rows, real, strict=True)]
    return inputs, lambda: [(mask[n].bool(), meant(cell, text)) for n, text in enumerate(texts)]


def tree_of(draw: random.Random, count: int) -> list[list[int]]:
    """The path to each draft, itself included; the first comes after the prompt."""
    paths: list[list[int]] = []
    for draft in range(count):
        before = paths[draw.randrange(max(0, draft - 4), draft)] if draft else []
        paths.append([*before, draft])
    return paths


def _tree(cell, rows, chosen):
    """A prompt and a tree of drafts after it, each path of which is a text."""
    row, draw = rows[0], random.Random(chosen)
    prompt = draw.randint(0, len(row) - 1)
    paths = tree_of(draw, len(row) - prompt)
    visible = torch.ones(len(row), len(row)).tril().bool()
    visible[prompt:, prompt:] = False
    for draft, path in enumerate(paths):
        visible[prompt + draft, [prompt + step for step in path]] = True
    at = torch.tensor([*range(prompt), *(prompt + len(path) - 1 for path in paths)])
    mask = four_dimensions(cell, visible, numbers=False)
    inputs = {"input_ids": row[None], "attention_mask": mask, "position_ids": at[None]}

    def expected():
        drafts = [meant(cell, torch.cat([row[:prompt], row[prompt:][path]]))[-1:] for path in paths]
        before = [meant(cell, row[:prompt])] if prompt else []
        yield slice(None), torch.cat([*before, *drafts])

    return inputs, expected


PASSES = {
    "none": _same_length,
    "left": _left,
    "left_untold": _left_untold,
    "right": _right,
    "packed": _packed,
    "packed_4d": lambda cell, rows, chosen: _packed(cell, rows, chosen, four=True),
    "prefix": _prefix,
    "prefix_float": lambda cell, rows, chosen: _prefix(cell, rows, chosen, numbers=True),
    "jumping": _jumping,
    "holes": _holes,
    "tree": _tree,
}
