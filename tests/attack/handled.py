"""Live models in the hands of others: cast, copied, pickled, resized, initialized anew, their layers moved, offloaded;
called by two threads at once, by `torch.func`, in inference mode, traced."""

from __future__ import annotations

import copy
import io
import pickle
import random
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from attack.caches import Held
from attack.compiled import Logits
from attack.drawing import (
    NATIVE,
    Cell,
    Drawn,
    asked,
    compare,
    drawn_cell,
    drawn_ids,
    judged_by,
    meant,
    original,
    patched,
)
from attack.passes import _left
from attack.reference import KEEPING, OWN_TABLE
from cells import VOCAB
from transformers import DynamicCache

from hf_posenc import patch_model

KINDS = ("llama", "qwen3", "gpt2", "bert")
WAYS = ("pass", "pass", "cache", "cache", "inference", "functional", "threads", "traced")
PROJECTIONS = {"gpt2": ["c_attn"], "bert": ["query", "value"]}


def layers_of(model: Any) -> Any:
    body = model.base_model
    return body.layers if hasattr(body, "layers") else body.h if hasattr(body, "h") else body.encoder.layer


def _stored(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _resized(model: Any) -> Any:
    model.resize_token_embeddings(VOCAB + 7)
    return model


def _recomputed(model: Any) -> Any:
    model.gradient_checkpointing_enable()
    return model.train()


def _initialized(model: Any) -> Any:
    """Every weight at random again, as who trains from the start does."""
    for part in (*model.modules(), *model.parameters()):
        vars(part).pop("_is_hf_initialized", None)
    torch.manual_seed(3)
    model.init_weights()
    return model


def _merged(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    names = PROJECTIONS.get(model.config.model_type, ["q_proj", "v_proj"])
    turned = model.config.model_type == "gpt2"
    torch.manual_seed(3)
    return get_peft_model(
        model, LoraConfig(r=2, target_modules=names, init_lora_weights=False, fan_in_fan_out=turned)
    ).merge_and_unload()


def _offloaded(model: Any) -> Any:
    """Weights that leave after each call, and then stay again."""
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_module

    weights = model.state_dict()
    model = cpu_offload(model)
    with torch.no_grad():
        model(torch.ones(1, 5).long())
    remove_hook_from_module(model, recurse=True)
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    return model


def _swapped(model: Any) -> Any:
    layers = layers_of(model)
    layers[0], layers[1] = layers[1], layers[0]
    for place, layer in enumerate(layers):
        for part in layer.modules():
            if hasattr(part, "layer_idx"):
                part.layer_idx = place
    return model


HANDLINGS: dict[str, Callable[[Any], Any]] = {
    "double": lambda model: model.double(),
    "halved": lambda model: model.to(torch.bfloat16).float(),
    "copied": copy.deepcopy,
    "pickled": lambda model: pickle.loads(pickle.dumps(model)),
    "stored": _stored,
    "resized": _resized,
    "recomputed": _recomputed,
    "initialized": _initialized,
    "merged": _merged,
    "offloaded": _offloaded,
    "swapped": _swapped,
}


def drawn_handled(draw: random.Random) -> Drawn:
    cell = drawn_cell(draw, KINDS)
    way = draw.choice(WAYS if cell.kind != "bert" else [way for way in WAYS if way != "cache"])
    early = draw.random() < 0.3
    names = [name for name in HANDLINGS if _fits(name, cell, way, early)]
    handlings = [draw.choice(names) for _ in range(draw.randint(1, 3))]
    rows = [drawn_ids(draw, draw.randint(1, 80)) for _ in range(2)]
    traits = dict(handling=handlings, way=way, early=early)
    case = Drawn("handled", cell, traits, made=partial(_made, handlings, early))
    seed = draw.random()

    def run(model: Any, cell: Cell) -> None:
        swapped = not early and handlings.count("swapped") % 2 == 1
        with judged_by(cell, model.state_dict(), swapped), torch.no_grad():
            if way == "cache":
                held = Held(cell, model, DynamicCache(config=model.config), rows, random.Random(seed))
                held.feed()
                held.feed()
            elif way == "traced":
                judge_traced(model, cell, rows)
            else:
                inputs, expected = _left(cell, rows, 0.0)
                found = CALLS[way](model, inputs)
                for row, (where, told) in enumerate(expected()):
                    compare(cell, found[row, where], told, f"row {row}")

    case.run = run
    return case


def _fits(handling: str, cell: Cell, way: str, early: bool) -> bool:
    if handling == "recomputed":  # the others have dropout
        return cell.kind in ("llama", "qwen3") and way != "cache"
    if handling == "offloaded":  # a sealed table has a row more in a state dict
        return early or cell.scheme not in (*KEEPING, "learned") or cell.kind not in OWN_TABLE
    return True


def _made(handlings: list[str], early: bool, cell: Cell) -> Any:
    model = copy.deepcopy(original(cell.kind, cell.dtype, cell.kernel) if early else patched(cell))
    for handling in handlings:
        model = HANDLINGS[handling](model)
    if early and cell.scheme != NATIVE:
        given, options = asked(cell)
        patch_model(model, given, **options)
    return model


def _inference(model, inputs):
    with torch.inference_mode():
        return model(**inputs).logits.clone()


def _functional(model, inputs):
    weights = {name: weight.clone() for name, weight in model.named_parameters()}
    return torch.func.functional_call(model, weights, (), inputs).logits


def _threads(model, inputs):
    """While others read other texts."""
    usual = sys.getswitchinterval()
    others = {name: given[:, 1:] for name, given in inputs.items()} if inputs["input_ids"].shape[1] > 1 else inputs

    def call(given):
        with torch.no_grad():
            return model(**given).logits

    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(call, [inputs, others, inputs, others, inputs, others, inputs]))[::2]
    finally:
        sys.setswitchinterval(usual)
    off = [(each - found[0]).abs().amax((1, 2)) for each in found]
    return found[int(torch.stack(off).amax(1).argmax())]  # that which is farthest from the others


def judge_traced(model, cell, rows):
    """By torch.jit, at another length."""
    traced = torch.jit.trace(Logits(model, cell.kind != "bert"), torch.ones(1, 9).long(), check_trace=False)
    for row in rows:
        compare(cell, traced(row[None])[0], meant(cell, row), f"{len(row)} tokens, traced at 9")


CALLS = {
    "pass": lambda model, inputs: model(**inputs).logits,
    "inference": _inference,
    "functional": _functional,
    "threads": _threads,
}
