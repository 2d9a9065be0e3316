"""Rotations and tables against references that share no code with them: made by hand, or transformers' own."""

import math

import numpy as np
import pytest
import torch
from cells import LENGTH, tiny, tokens
from references import ROTATIONS, logits, transformers_rope
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc import patch_model

# ---------------------------------------------------------------- rotation


def complex_pairs(x: Tensor) -> Tensor:
    """Channels i and i + d/2 as one complex number, as in LLaMA."""
    first, second = x.double().chunk(2, -1)
    return torch.complex(first, second)


def complex_attention(q: Tensor, k: Tensor, v: Tensor, inv_freq: Tensor, scale: float, causal: bool) -> Tensor:
    """Attention whose q and k are turned by complex multiplication, (batch, tokens, hidden)."""
    length = q.shape[2]
    angle = torch.arange(length)[:, None].double() * inv_freq.double()
    turn = torch.polar(torch.full_like(angle, scale), angle)
    q_turned, k_turned = complex_pairs(q) * turn, complex_pairs(k) * turn
    scores = torch.einsum("bhic,bhjc->bhij", q_turned, k_turned.conj()).real / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
    return (scores.softmax(-1) @ v.double()).transpose(1, 2).flatten(2).float()


def split_heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def gpt2_by_hand(attn: nn.Module, states: Tensor, inv_freq: Tensor, scale: float, causal: bool) -> Tensor:
    qkv = states @ attn.c_attn.weight + attn.c_attn.bias
    q, k, v = (split_heads(x, 4) for x in qkv.chunk(3, -1))
    return complex_attention(q, k, v, inv_freq, scale, causal) @ attn.c_proj.weight + attn.c_proj.bias


def bert_by_hand(attn: nn.Module, states: Tensor, inv_freq: Tensor, scale: float, causal: bool) -> Tensor:
    layers = (attn.query, attn.key, attn.value)
    q, k, v = (split_heads(states @ layer.weight.T + layer.bias, 4) for layer in layers)
    return complex_attention(q, k, v, inv_freq, scale, causal)


def observed(model: PreTrainedModel, attention: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    """What went into an attention layer and what came out."""
    seen = {}

    def keep(module, args, kwargs, output):
        seen["in"], seen["out"] = (args[0] if args else kwargs["hidden_states"]), output[0]

    handle = attention.register_forward_hook(keep, with_kwargs=True)
    logits(model, ids)
    handle.remove()
    return seen["in"], seen["out"]


@pytest.mark.parametrize("scheme", ROTATIONS)
@pytest.mark.parametrize("kind", ["gpt2", "bert", "bert_decoder"])
@pytest.mark.parametrize("layer", [0, 1])
def test_rotation_is_complex_multiplication(scheme, kind, layer):
    options, rope = ROTATIONS[scheme]
    inv_freq, scale = transformers_rope(16, LENGTH, 4 * LENGTH, **rope)
    model = patch_model(tiny(kind, hidden_size=64), scheme=scheme, **options)
    if kind == "gpt2":
        attention, by_hand = model.transformer.h[layer].attn, gpt2_by_hand
    else:
        attention, by_hand = model.bert.encoder.layer[layer].attention.self, bert_by_hand
    states, ours = observed(model, attention, tokens(2, 40))
    with torch.no_grad():
        theirs = by_hand(attention, states, inv_freq, scale, kind != "bert")
    assert (scale > 1) == (scheme == "yarn")
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("scheme", ROTATIONS)
def test_live_rotary_module_of_llama(scheme):
    options, rope = ROTATIONS[scheme]
    inv_freq, scale = transformers_rope(16, LENGTH, 4 * LENGTH, **rope)
    model = patch_model(tiny("llama", hidden_size=64), scheme=scheme, **options)
    positions = torch.tensor([[0, 1, 2, 31, 32, 100, 1000], [5, 4, 3, 2, 1, 0, 4000]])
    cos, sin = model.model.rotary_emb(torch.zeros(1), position_ids=positions)
    angle = positions[..., None].double() * inv_freq.double()
    turn = torch.polar(torch.full_like(angle, scale), angle)
    turn = torch.cat([turn, turn], -1)
    torch.testing.assert_close(torch.complex(cos, sin).to(torch.complex128), turn, atol=2e-3, rtol=0)
    near = torch.complex(cos, sin)[0, :6].to(torch.complex128)
    torch.testing.assert_close(near, turn[0, :6], atol=2e-5, rtol=0)


@pytest.mark.parametrize("scheme", ROTATIONS)
def test_llama_computes_what_transformers_does_from_the_same_keys(scheme):
    """A model that transformers alone makes from rope_parameters, with the same weights."""
    options, rope = ROTATIONS[scheme]
    if rope["rope_type"] in ("yarn", "llama3"):
        rope = dict(rope, original_max_position_embeddings=LENGTH)
    rope = {"rope_theta": 10_000.0, **rope}
    theirs = tiny("llama", hidden_size=64, max_position_embeddings=4 * LENGTH, rope_parameters=rope)
    ours = patch_model(tiny("llama", hidden_size=64), scheme=scheme, **options)
    ids = tokens(2, 60)
    torch.testing.assert_close(logits(ours, ids), logits(theirs, ids), atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------- tables


def sinusoids_by_hand(length: int, size: int, base: float, layout: str) -> Tensor:
    table = np.zeros((length, size))
    for p in range(length):
        for i in range(size // 2):
            angle = p / base ** (2 * i / size)
            at = (2 * i, 2 * i + 1) if layout == "interleaved" else (i, size // 2 + i)
            table[p, at[0]], table[p, at[1]] = math.sin(angle), math.cos(angle)
    return torch.tensor(table, dtype=torch.float32)


def with_vectors(kind: str, ids: Tensor, vectors: Tensor) -> Tensor:
    """Logits of the model without positions, whose input embeddings have the vectors added."""
    model = patch_model(tiny(kind), scheme="none")
    embedded = model.get_input_embeddings()(ids).detach()
    return logits(model, inputs_embeds=embedded + vectors)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt2", "bert", "bert_decoder"])
@pytest.mark.parametrize("layout", ["interleaved", "concatenated"])
@pytest.mark.parametrize("base", [10_000.0, 1_000.0])
def test_sinusoids_through_input_embeddings(kind, layout, base):
    ids = tokens(2, 50)
    ours = patch_model(tiny(kind), scheme="sinusoidal", layout=layout, base=base)
    theirs = with_vectors(kind, ids, sinusoids_by_hand(50, 32, base, layout))
    torch.testing.assert_close(logits(ours, ids), theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_learned_table_through_input_embeddings(kind):
    ids = tokens(2, 50)
    model = patch_model(tiny(kind), scheme="learned", target_length=64)
    at = {"llama": "posenc_table", "gpt2": "wpe", "bert": "embeddings.position_embeddings"}[kind]
    weight = model.base_model.get_submodule(at).weight.detach()
    assert weight.shape == (64, 32) and weight.std() > 0.1
    torch.testing.assert_close(logits(model, ids), with_vectors(kind, ids, weight[:50]), atol=1e-4, rtol=1e-4)
