"""`generate`, in every way that it has."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
from attack.drawing import (
    WORST,
    Cell,
    Drawn,
    Wrong,
    compare,
    drawn_block,
    drawn_cell,
    drawn_ids,
    helper,
    meant,
    padded,
)
from cells import VOCAB
from transformers import ContinuousBatchingConfig

WAYS = ("greedy", "beam", "assisted", "lookup", "static", "sample", "chunked", "continuous", "no_cache")


def drawn_generation(draw: random.Random) -> Drawn:
    cell = drawn_cell(draw, ("llama", "qwen3", "gpt2"))
    way = draw.choice(WAYS)
    count = 1 if way in ("assisted", "lookup") else draw.randint(1, 3)
    rows = [drawn_ids(draw, draw.randint(1, cell.longest - 12)) for _ in range(count)]
    if way == "lookup":
        rows = [torch.cat([row[: len(row) // 2 + 1]] * 2)[: cell.longest - 12] for row in rows]
    block = None if way == "continuous" else drawn_block(draw)  # which runs in a thread of its own
    case = Drawn("generate", cell, dict(way=way, rows=count), block=block)
    seed = draw.randrange(1 << 30)

    def run(model: Any, cell: Cell) -> None:
        ids, mask = padded(rows, left=True)
        if way == "continuous":
            return judge_requests(model, cell, rows)
        about = settings(way, cell.kind, seed)
        torch.manual_seed(seed)
        with torch.no_grad():
            made = model.generate(ids, attention_mask=mask, **about)
        (judge_beams if way == "beam" else judge_tokens)(cell, rows, ids, made)

    case.run = run
    return case


def settings(way: str, kind: str, seed: int) -> dict[str, Any]:
    """What `generate` is told."""
    about: dict[str, Any] = dict(min_new_tokens=8, max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
    about["output_logits"] = way not in ("beam", "assisted", "lookup")
    beams = dict(num_beams=3, num_return_sequences=2, output_scores=True, length_penalty=1.0)
    more: dict[str, dict[str, Any]] = {
        "beam": dict(beams, min_new_tokens=None, eos_token_id=VOCAB + 5),
        "lookup": dict(prompt_lookup_num_tokens=3),
        "static": dict(cache_implementation="static", disable_compile=True),
        "sample": dict(do_sample=True, top_k=5),
        "chunked": dict(prefill_chunk_size=1 + seed % 20),
        "no_cache": dict(use_cache=False),
    }
    if way == "assisted":
        about["assistant_model"] = helper(kind)
    return about | more.get(way, {})


def judge_tokens(cell, rows, ids, made):
    """The logits of each step, where generate gives them; else that each token is the reference's best, or near it."""
    width = ids.shape[1]
    for n, row in enumerate(rows):
        new = made.sequences[n, width:]
        told = meant(cell, torch.cat([row, new]))[len(row) - 1 : -1]
        if made.get("logits") is not None:
            compare(cell, torch.stack([step[n] for step in made.logits]), told, f"row {n}")
        else:
            told[:, 2] = -torch.inf  # the end comes after min_new_tokens
            short = told.max(-1).values - told.gather(1, new[:, None])[:, 0]
            if float(short.max()) > 2 * WORST["float32"]:
                raise Wrong(f"row {n}: a token {float(short.max()):.4f} below the best")


def judge_beams(cell, rows, ids, made):
    width = ids.shape[1]
    for n in range(len(made.sequences)):
        row, new = rows[n // 2], made.sequences[n, width:]
        told = meant(cell, torch.cat([row, new]))[len(row) - 1 : -1].log_softmax(-1)
        total = told.gather(1, new[:, None]).sum() / len(new)
        if abs(float(total - made.sequences_scores[n])) > WORST["float32"]:
            raise Wrong(f"beam {n}: its score is {float(total - made.sequences_scores[n]):.4f} off")


def judge_requests(model, cell, rows):
    """transformers' continuous batching, on a copy: it changes the model's attention for as long as it runs."""
    sizes = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=64)  # or it takes most of the memory there is
    made = copy.deepcopy(model).generate_batch(
        [row.tolist() for row in rows], continuous_batching_config=sizes, max_new_tokens=6
    )
    if len(made) != len(rows):
        raise Wrong(f"{len(made)} answers to {len(rows)} requests")
    for row, answer in zip(rows, made.values(), strict=True):
        new = torch.tensor(answer.generated_tokens)
        told = meant(cell, torch.cat([row, new]))[len(row) - 1 : -1]
        short = told.max(-1).values - told.gather(1, new[:, None])[:, 0]
        if float(short.max()) > 2 * WORST["float32"]:
            raise Wrong(f"a token {float(short.max()):.4f} below the best")
