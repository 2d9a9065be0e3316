"""What speed.py measures: models, and caches of any length without the time that it takes to read so much."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

import hf_posenc
from hf_posenc import patch_model

TRAINED, WINDOW = 2048, 1024
ROOM = 512
"""Slots of a static cache for the tokens that are decoded while it is timed: the unpatched one serves all schemes."""
FOLLOWING, ZONES = ("dynamic_ntk", "longrope"), ("self_extend", "rerope", "dca")
SHORT = ("window", "streaming", "lm_infinite", "sparse")
OPTIONS: dict[str, dict[str, Any]] = {
    "yarn": dict(factor=4.0),
    "longrope": dict(factor=4.0),
    "self_extend": dict(factor=4.0, window=WINDOW),
    **{scheme: dict(window=WINDOW) for scheme in ("rerope", *SHORT)},
}
LLAMA = dict(
    hidden_size=512,
    intermediate_size=1376,
    num_attention_heads=8,
    vocab_size=1000,
    max_position_embeddings=TRAINED,
)


def model_of(scheme: str, device: str, variant: str = "", kind: str = "llama") -> Any:
    """A model of random weights, always the same; unpatched for the scheme ''."""
    torch.manual_seed(0)
    if kind == "gpt2":
        sizes = dict(n_embd=512, n_layer=4, n_head=8, n_positions=8192, vocab_size=1000)
        model: Any = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    else:
        layers = 1 if variant == "compiled" else 4  # compiling takes long
        config = LlamaConfig(**LLAMA, num_hidden_layers=layers, num_key_value_heads=2 if variant == "gqa" else 8)
        model = LlamaForCausalLM(config)
    model.eval().to(device, torch.bfloat16 if variant == "bf16" else torch.float32)
    return patch_model(model, scheme, **OPTIONS.get(scheme, {})) if scheme else model


def trained_biases() -> list[str]:
    """The schemes that add a bias with parameters; terms that look at content are not biases."""
    found = []
    for scheme in hf_posenc.SCHEMES:
        config = LlamaConfig(**{**LLAMA, "max_position_embeddings": 64}, num_hidden_layers=1)
        try:
            model = patch_model(LlamaForCausalLM(config), scheme)
        except (hf_posenc.PosencError, TypeError):  # not for this model, or not without options
            continue
        bias = model.base_model.posenc_bias if hasattr(model.base_model, "posenc_bias") else None
        if bias is not None and not bias.of_terms and any(True for _ in bias.parameters()):
            found.append(scheme)
    return found


def token_ids(batch: int, length: int, device: str) -> Any:
    return torch.randint(3, 1000, (batch, length), generator=torch.Generator().manual_seed(1)).to(device)


def cache_of(model: Any, batch: int, length: int, static: bool) -> Any:
    """A cache of so many tokens."""
    config, device = model.config, model.device
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    shape = (batch, heads, length, config.hidden_size // config.num_attention_heads)
    cache: Any = StaticCache(config=config, max_cache_len=length + ROOM) if static else DynamicCache(config=config)
    if getattr(config, "posenc", {}).get("scheme") == "streaming":
        # Nobody else can fill its cache, which is full and as large as it gets after a window.
        model(token_ids(batch, WINDOW + 64, device), past_key_values=cache, logits_to_keep=1)
        return cache
    generator = torch.Generator().manual_seed(2)
    for layer in range(config.num_hidden_layers):
        keys = torch.randn(shape, generator=generator).to(device, model.dtype)
        cache.update(keys, keys.flip(-1), layer)
    return cache


def size_of(held: Any, known: set[int]) -> int:
    """Bytes of all tensors in a cache or a layer, each memory once."""
    if isinstance(held, torch.Tensor):
        storage = held.untyped_storage()
        fresh = storage.data_ptr() not in known
        known.add(storage.data_ptr())
        return storage.nbytes() if fresh else 0
    if isinstance(held, dict):
        return sum(size_of(value, known) for value in held.values())
    if isinstance(held, (list, tuple)):
        return sum(size_of(value, known) for value in held)
    return sum(size_of(value, known) for value in vars(held).values()) if hasattr(held, "__dict__") else 0
