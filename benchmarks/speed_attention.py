"""Rows of speed.py for what is added to a scheme, or to attention: biases, relative terms, temperatures, plans."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from speed_models import LLAMA, TRAINED, cache_of, token_ids
from transformers import LlamaConfig, LlamaForCausalLM

from hf_posenc import SCHEMES, patch_model
from hf_posenc.core.effects import Geometry
from hf_posenc.runtime import relative
from hf_posenc.runtime.attention_call import Call
from hf_posenc.runtime.kernels import sdpa

LENGTH = 4096
BIASES: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("t5", {}),
    "kerple": ("kerple", {}),
    "sandwich": ("sandwich", {}),
    "fire": ("fire", {"threshold": LENGTH}),
    "fire past 512": ("fire", {}),
}
TERMS = ("shaw", "transformer_xl", "deberta")
PARTS: dict[str, dict[str, Any]] = {"none": {}, "yarn": {"factor": 4.0}, "alibi": {}, "window": {"window": 512}}
KINDS = ("log", "ssmax")
PLANS = (("none", "yarn"), ("none", "window"), ("alibi", "yarn"))
Calls = dict[str, Callable[[], object]]


def attention_calls(device: str) -> Calls:
    """One layer of causal attention, with nothing ('') and with each bias and relative term."""
    sizes = dict(hidden_size=512, num_heads=8, head_dim=64, rotary_dim=64)
    geometry = Geometry(**sizes, trained_length=TRAINED, causal=True, layers=1)
    generator = torch.Generator().manual_seed(0)
    x = [torch.randn(1, 8, LENGTH, 64, generator=generator).to(device) for _ in range(3)]
    at = torch.arange(LENGTH, device=device)[None]
    layer: Any = torch.nn.Module().eval()
    layer.is_causal, layer.num_key_value_groups = True, 1
    calls: Calls = {"": lambda: F.scaled_dot_product_attention(*x, is_causal=True).transpose(1, 2).contiguous()}
    for name, (scheme, options) in BIASES.items():
        bias = SCHEMES[scheme](**options).effect(geometry).bias.to(device)
        calls[name] = partial(sdpa, layer, *x, None, bias=bias, call=Call(at, at, 0))
    for name in TERMS:
        bias = SCHEMES[name]().effect(geometry).bias.to(device)
        calls[name] = partial(relative.attend, layer, *x, None, Call(at, at, 0), bias, 0, causal=True, weighs=False)
    return calls


def compose_model(what: Any, device: str, **options: Any) -> Any:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**LLAMA, num_hidden_layers=4)).eval().to(device)
    return patch_model(model, what, **options)


def temperature_models(scheme: str, device: str) -> dict[str, Any]:
    """A scheme without a temperature ('') and with each."""
    told: list[dict[str, Any]] = [{}, *({"temperature": kind} for kind in KINDS)]
    return {
        kind: compose_model(scheme, device, **PARTS[scheme], **t) for kind, t in zip(("", *KINDS), told, strict=True)
    }


def plan_models(one: str, other: str, device: str) -> dict[str, Any]:
    """A plan of two schemes ('plan'), every second layer each, and models that are all one or all the other."""
    plan = {"every 2nd": (one, PARTS[one]), "rest": (other, PARTS[other])}
    return {
        "plan": compose_model(plan, device),
        **{name: compose_model(name, device, **PARTS[name]) for name in (one, other)},
    }


def reading(model: Any, device: str) -> Callable[[], object]:
    return partial(model, token_ids(1, 1024, device), use_cache=False, logits_to_keep=1)


def decoding(model: Any, device: str, tokens: int = 10) -> Callable[[], object]:
    """One token after 2048, some times; the cache is cut back after each."""
    cache, ids, at = cache_of(model, 1, 2048, False), token_ids(1, 1, device), torch.tensor([[2048]], device=device)

    def step() -> None:
        for _ in range(tokens):
            model(ids, past_key_values=cache, position_ids=at)
            cache.crop(-1)

    return step
