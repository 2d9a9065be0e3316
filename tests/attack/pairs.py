"""Encoders with decoders whose layers are told no positions, or count them: padded, cached, generating."""

from __future__ import annotations

import copy
import random
from functools import cache
from typing import Any

import torch
from attack.drawing import NATIVE, SCHEMES, WORST, Cell, Drawn, Wrong, compare, drawn_block, drawn_ids, padded
from attack.stacks import Pair
from cells import LENGTH
from test_untold import bart, t5
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from hf_posenc import patch_model

KINDS = ("t5", "mt5", "umt5", "bart")
TOLD = [name for name in SCHEMES if name not in ("plan", "fox", "cable")]
TABLES = ("sinusoidal", "fourier", "learned")
PATTERNS = ("self_extend", "rerope", "dca", "streaming", "lm_infinite", "string")
"""Of RoPE, which none of these families has: refused."""
WAYS = ("whole", "whole", "parts", "parts", "static", "greedy", "beam")


def drawn_pair(draw: random.Random) -> Drawn:
    kind = draw.choice(KINDS)
    refused = (*PATTERNS, *(() if kind == "bart" else (*TABLES, "window", "sparse")))
    scheme = draw.choice([name for name in TOLD if name not in refused or draw.random() < 0.05])
    cell = Cell(scheme, draw.randrange(len(SCHEMES[scheme])), kind, "float32", draw.choice(("sdpa", "eager")))
    way, count = draw.choice(WAYS), draw.randint(1, 3)
    longest = 40 if kind == "bart" and scheme not in TABLES else 80
    read = [drawn_ids(draw, draw.randint(1, longest)) for _ in range(count)]
    rows = [torch.cat([torch.ones(1).long(), drawn_ids(draw, draw.randint(1, longest))]) for _ in range(count)]
    case = Drawn("pair", cell, dict(way=way), block=drawn_block(draw), made=patched_pair)
    seed = draw.random()

    def run(model: Any, cell: Cell) -> None:
        texts, text_mask = padded(read, left=False)
        ids, mask = padded(rows, left=True)
        given = dict(input_ids=texts, attention_mask=text_mask)
        pads = [ids.shape[1] - len(row) for row in rows]
        if way in ("greedy", "beam"):
            return judge_generated(model, cell, read, rows, given, ids, mask, way == "beam")
        with torch.no_grad():
            if way == "whole":
                found = model(**given, decoder_input_ids=ids, decoder_attention_mask=mask).logits
            else:
                found = in_parts(model, given, ids, mask, way == "static", random.Random(seed))
        for n, row in enumerate(rows):
            compare(cell, found[n, pads[n] :], judge_pair(cell).logits(read[n], row, pads[n]), f"row {n}")

    case.run = run
    return case


def in_parts(model, given, ids, mask, static, draw):
    own = StaticCache(config=model.config, max_cache_len=96) if static else DynamicCache()
    past, start, parts = EncoderDecoderCache(own, DynamicCache()), 0, []
    width = ids.shape[1]
    for end in sorted({draw.randint(1, width) for _ in range(draw.randint(1, 5))} | {width}):
        new = dict(decoder_input_ids=ids[:, start:end], decoder_attention_mask=mask[:, :end])
        parts.append(model(**given, past_key_values=past, use_cache=True, **new).logits)
        start = end
    return torch.cat(parts, 1)


def judge_generated(model, cell, read, rows, given, ids, mask, beam):
    about = dict(do_sample=False, max_new_tokens=6, return_dict_in_generate=True)
    about |= dict(eos_token_id=None, forced_eos_token_id=None)
    about["decoder_start_token_id"] = 1  # with which a row begins, or transformers puts it in front of the padding
    about |= dict(num_beams=3, output_scores=True) if beam else dict(output_logits=True)
    with torch.no_grad():
        made = model.generate(**given, decoder_input_ids=ids, decoder_attention_mask=mask, **about)
    width = ids.shape[1]
    for n, row in enumerate(rows):
        new = made.sequences[n, -6:]
        text = torch.cat([row, new])
        told = judge_pair(cell).logits(read[n], text, width - len(row))[-7:-1]
        if not beam:
            compare(cell, torch.stack([step[n] for step in made.logits]), told, f"row {n}")
            continue
        total = told.log_softmax(-1).gather(1, new[:, None]).sum()
        off = float(total - made.sequences_scores[n] * (made.sequences.shape[1]))
        alike = float(total - made.sequences_scores[n] * len(new))
        if min(abs(off), abs(alike)) > 10 * WORST["float32"]:
            raise Wrong(f"row {n}: its score is {alike:.4f} off")


@cache
def patched_pair(cell: Cell) -> Any:
    model = copy.deepcopy(bart("bart") if cell.kind == "bart" else t5(cell.kind))
    model.set_attn_implementation(cell.kernel)
    if cell.scheme != NATIVE:
        patch_model(model, cell.scheme, trained_length=LENGTH, **cell.options)
    for name, parameter in model.named_parameters():
        if "posenc_bias" in name and cell.scheme == "t5":
            generator = torch.Generator().manual_seed(1)
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return model


@cache
def judge_pair(cell: Cell) -> Pair:
    return Pair(cell.kind, cell.scheme, cell.options, patched_pair(cell).state_dict())
