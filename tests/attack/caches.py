"""Rows in a cache, and what is done to it between calls."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import torch
from attack.drawing import DTYPES, Cell, Drawn, compare, drawn_block, drawn_cell, drawn_ids, meant, padded
from attack.passes import tree_of
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Cache, QuantizedLayer


class Lossless(QuantizedLayer):
    """A quantised layer that loses nothing, so that what it gives back can be judged."""

    def _quantize(self, tensor, axis):
        return tensor.clone()

    def _dequantize(self, tensor):
        return tensor


CACHES = {
    "dynamic": lambda config: DynamicCache(config=config),
    "lazy": lambda config: DynamicCache(),
    "static": lambda config: StaticCache(config=config, max_cache_len=192),
    "quantised": lambda config: Cache(layers=[Lossless(residual_length=6) for _ in range(2)]),
}
OPERATIONS = {
    "dynamic": ("reorder", "select", "repeat", "contrast", "crop", "draft", "deepcopy", "pickle", "offload", "reset"),
    "lazy": ("reorder", "select", "repeat", "contrast", "crop", "draft", "deepcopy", "pickle", "offload"),
    "static": ("reorder", "reset", "deepcopy"),
    "quantised": ("reorder", "deepcopy", "pickle", "reset"),
}


def drawn_cache(draw: random.Random) -> Drawn:
    cell = drawn_cell(draw, ("llama", "qwen3", "gpt2"), ("float32",) * 6 + ("float64", "bfloat16"))
    which = draw.choice(tuple(CACHES))
    operations = [draw.choice(OPERATIONS[which]) for _ in range(draw.randint(1, 3))]
    room = cell.longest - 4 * (len(operations) + 1)
    rows = [drawn_ids(draw, draw.randint(1, max(room, 2))) for _ in range(draw.randint(1, 3))]
    case = Drawn("cache", cell, dict(cache=which, operations=operations), block=drawn_block(draw))
    seed = draw.random()

    def run(model: Any, cell: Cell) -> None:
        held = Held(cell, model, CACHES[which](model.config), rows, random.Random(seed))
        for operation in operations:
            held.do(operation)
            held.feed()

    case.run = run
    return case


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda past: pickle.loads(pickle.dumps(past))}


class Held:
    """Rows in a cache, and beside it what they should be: operations are done to both."""

    def __init__(self, cell, model, past, rows, draw):
        self.cell, self.model, self.past, self.draw = cell, model, past, draw
        self.start(rows)

    def start(self, rows):
        self.rows = [row.clone() for row in rows]
        ids, self.mask = padded(self.rows, left=True)
        width, start = ids.shape[1], 0
        cuts = sorted({self.draw.randint(1, width) for _ in range(self.draw.randint(0, 3))} | {width})
        for end in cuts:
            found = self.pass_over(ids[:, start:end], end)
            start = end
        self.check(found[:, -1:], "after the prompt")

    def pass_over(self, ids, end):
        mask = self.mask[:, :end]
        places = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        with torch.no_grad():
            return self.model(ids, attention_mask=mask, position_ids=places, past_key_values=self.past).logits

    def check(self, found, what):
        count = found.shape[1]
        told = torch.stack([meant(self.cell, row)[-count:] for row in self.rows])
        compare(self.cell, found, told, what)

    def feed(self, count=None):
        count = count or self.draw.randint(1, 4)
        new = torch.stack([drawn_ids(self.draw, count) for _ in self.rows])
        self.mask = torch.cat([self.mask, torch.ones_like(new)], 1)
        found = self.pass_over(new, self.mask.shape[1])
        self.rows = [torch.cat([row, more]) for row, more in zip(self.rows, new, strict=True)]
        self.check(found, f"{count} more")

    def choose(self, which):
        self.rows, self.mask = [self.rows[i].clone() for i in which], self.mask[torch.tensor(which)]

    def do(self, operation):
        many, draw = len(self.rows), self.draw
        if operation in ("reorder", "select"):
            count = many if operation == "reorder" else draw.randint(1, 3)
            which = [draw.randrange(many) for _ in range(count)]
            method = self.past.reorder_cache if operation == "reorder" else self.past.batch_select_indices
            method(torch.tensor(which))
            self.choose(which)
        elif operation == "repeat":
            times = draw.randint(1, 2)
            self.past.batch_repeat_interleave(times)
            self.choose([i for i in range(many) for _ in range(times)])
        elif operation in ("contrast", "draft"):
            getattr(self, operation)()
        elif operation == "offload":
            for layer in self.past.layers:
                layer.offload()
                layer.prefetch()
        elif operation == "crop":
            gone = draw.randint(0, min(map(len, self.rows)) - 1)
            if gone:
                self.past.crop(-gone)
                self.rows, self.mask = [row[:-gone] for row in self.rows], self.mask[:, :-gone]
        elif operation in COPIES:
            self.past = COPIES[operation](self.past)
        elif operation == "reset":
            self.past.reset()
            self.start([drawn_ids(draw, draw.randint(1, 20)) for _ in range(many)])

    def contrast(self):
        """A step of contrastive search: several ways to go on from each row, of which one is kept."""
        many, ways = len(self.rows), self.draw.randint(2, 4)
        self.past.batch_repeat_interleave(ways)
        self.choose([i for i in range(many) for _ in range(ways)])
        self.feed()
        chosen = [ways * i + self.draw.randrange(ways) for i in range(many)]
        self.past.batch_select_indices(torch.tensor(chosen))
        self.choose(chosen)

    def draft(self):
        """A tree of drafts is tried after each row, and none is taken."""
        paths, many = tree_of(self.draw, self.draw.randint(2, 6)), len(self.rows)
        new = torch.stack([drawn_ids(self.draw, len(paths)) for _ in self.rows])
        seen = torch.zeros(len(paths), len(paths), dtype=torch.bool)
        for draft, path in enumerate(paths):
            seen[draft, path] = True
        held = self.mask.bool()[:, None].expand(-1, len(paths), -1)
        mask = torch.cat([held, seen.expand(many, -1, -1)], 2)[:, None]
        if self.cell.kernel == "eager":
            least = torch.finfo(DTYPES[self.cell.dtype]).min
            mask = torch.zeros(mask.shape, dtype=DTYPES[self.cell.dtype]).masked_fill(~mask, least)
        places = torch.tensor([[len(row) + len(path) - 1 for path in paths] for row in self.rows])
        with torch.no_grad():
            found = self.model(new, attention_mask=mask, position_ids=places, past_key_values=self.past).logits
        for row, one in enumerate(self.rows):
            told = [meant(self.cell, torch.cat([one, new[row, path]]))[-1] for path in paths]
            compare(self.cell, found[row], torch.stack(told), "a tree of drafts")
        self.past.crop(-len(paths))
