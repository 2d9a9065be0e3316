"""Every site against a reference that shares no code with it: made by hand, or transformers' own."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cells import LENGTH, tiny, tokens
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, T5Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.bert.modeling_bert import eager_attention_forward  # noqa: F401  looked up by our kernel
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from hf_posenc import SCHEMES, patch_model
from hf_posenc.core.effects import FollowingRotation, Geometry, Rotation
from hf_posenc.runtime import kernels, renderings
from hf_posenc.runtime.attention_call import Call
from hf_posenc.schemes.alibi import LinearBias, slopes
from hf_posenc.schemes.t5 import BucketBias, bucket

LOWEST = torch.finfo(torch.float32).min


def logits(model: PreTrainedModel, ids: Tensor | None = None, **kwargs) -> Tensor:
    with torch.no_grad():
        return model(ids, **kwargs).logits


def with_mask(kind: str, ids: Tensor, bias: Tensor, causal: bool, **sizes) -> Tensor:
    """Logits of the model without positions, whose eager attention gets bias and causality as one float mask."""
    model = tiny(kind, **sizes)
    model.set_attn_implementation("eager")
    patch_model(model, scheme="none")
    if causal:
        length = ids.shape[1]
        future = torch.ones(length, length).triu(1).bool()
        bias = bias.masked_fill(future, LOWEST)
    return logits(model, ids, attention_mask=bias.expand(ids.shape[0], -1, -1, -1))


# ---------------------------------------------------------------- ALiBi

PAPER_SLOPES = {
    4: [2**-2, 2**-4, 2**-6, 2**-8],
    6: [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3],
}
"""The paper's geometric sequence for 4 heads, and with every second slope of 8 heads to fill up to 6."""

SIX_HEADS = dict(num_attention_heads=6, hidden_size=48)
ALIBI_MODELS = [
    ("llama", 4, {}),
    ("llama", 6, dict(SIX_HEADS, num_key_value_heads=3)),
    ("gpt2", 4, {}),
    ("gpt2", 6, SIX_HEADS),
    ("gpt2", 4, dict(scale_attn_by_inverse_layer_idx=True)),  # the penalty is not scaled with the scores
    ("gpt2", 4, dict(scale_attn_weights=False)),
    ("bert", 4, {}),
    ("bert", 6, SIX_HEADS),
    ("bert_decoder", 4, {}),
    ("bert_decoder", 6, SIX_HEADS),
]


def alibi_by_hand(heads: int, length: int) -> Tensor:
    """-m * |i - j|, written out; the causal case is its lower triangle."""
    bias = torch.zeros(1, heads, length, length)
    for head, slope in enumerate(PAPER_SLOPES[heads]):
        for i in range(length):
            for j in range(length):
                bias[0, head, i, j] = -slope * abs(i - j)
    return bias


@pytest.mark.parametrize("kind, heads, sizes", ALIBI_MODELS)
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("length", [9, 40])
def test_alibi_is_an_explicit_mask(kind, heads, sizes, kernel, length, monkeypatch):
    monkeypatch.setattr(renderings, "BLOCK", 16)  # so that encoders take several blocks
    ids = tokens(2, length)
    model = tiny(kind, **sizes)
    model.set_attn_implementation(kernel)
    ours = logits(patch_model(model, scheme="alibi"), ids)
    theirs = with_mask(kind, ids, alibi_by_hand(heads, length), kind != "bert", **sizes)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert", "bert_decoder"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_padded_alibi_is_an_explicit_mask(kind, side, kernel, monkeypatch):
    """Padding is hidden from the reference in the same float mask."""
    monkeypatch.setattr(renderings, "BLOCK", 16)
    ids, real = tokens(2, 40), torch.ones(2, 40, dtype=torch.long)
    real[1, slice(0, 11) if side == "left" else slice(29, 40)] = 0
    model = tiny(kind)
    model.set_attn_implementation(kernel)
    ours = logits(patch_model(model, scheme="alibi"), ids, attention_mask=real)
    bias = alibi_by_hand(4, 40).expand(2, -1, -1, -1).masked_fill(real[:, None, None] == 0, LOWEST)
    theirs = with_mask(kind, ids, bias, kind != "bert")
    torch.testing.assert_close(ours[real == 1], theirs[real == 1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_alibi_in_a_sliding_window_is_an_explicit_mask(kernel):
    """Mistral's own window stays: a query sees itself and the 7 before it."""
    ids, at = tokens(2, 40), torch.arange(40)
    model = tiny("mistral", sliding_window=8)
    model.set_attn_implementation(kernel)
    ours = logits(patch_model(model, scheme="alibi"), ids)
    bias = alibi_by_hand(4, 40).masked_fill(at[:, None] - at >= 8, LOWEST)
    theirs = with_mask("mistral", ids, bias, causal=True)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 8, 12, 14, 16, 20, 32, 40, 71])
def test_slopes_are_blooms(heads):
    theirs = build_alibi_tensor(torch.ones(1, 2, dtype=torch.long), heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(torch.tensor(slopes(heads)), theirs)


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 8, 12, 14, 16, 20, 32, 40, 71])
@pytest.mark.parametrize("bias_max", [8, 4])
def test_slopes_are_mpts(heads, bias_max):
    """Head by head: MPT takes the even, then the odd slopes of the next power of two, which is the same order."""
    theirs = -build_mpt_alibi_tensor(heads, 2, bias_max)[:, 0, 0]
    torch.testing.assert_close(torch.tensor(slopes(heads, bias_max)), theirs)


def heads_of(batch: int, heads: int, length: int, size: int, dtype=torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(batch, heads, length, size, generator=generator).to(dtype) for _ in range(3))


class Layer(nn.Module):
    """As far as an attention kernel sees a layer: its class stands beside an eager attention, here BERT's."""

    def __init__(self, causal: bool):
        super().__init__()
        self.is_causal = causal


def attention_module(causal: bool) -> nn.Module:
    return Layer(causal).eval()


def whole_call(length: int) -> Call:
    return Call(torch.arange(length)[None], torch.arange(length)[None], 0, False)


def dense(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> Tensor:
    """Attention in fp32 over the whole score matrix, (batch, tokens, heads, channels)."""
    scores = q.float() @ k.float().transpose(2, 3) / math.sqrt(q.shape[-1])
    scores = scores if bias is None else scores + bias
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
    return (scores.softmax(-1) @ v.float()).transpose(1, 2)


@pytest.mark.parametrize("heads", [4, 6])
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_attention_with_blooms_alibi(heads, kernel):
    length = 50
    q, k, v = heads_of(2, heads, length, 16)
    theirs = build_alibi_tensor(torch.ones(2, length, dtype=torch.long), heads, torch.float32)
    theirs = dense(q, k, v, theirs.view(2, heads, 1, length), causal=True)
    mask = torch.ones(length, length).tril().bool()[None, None] if kernel == "eager" else None
    bias = LinearBias(slopes(heads), causal=True)
    run = getattr(kernels, kernel)
    ours, _ = run(attention_module(True), q, k, v, mask, bias=bias, call=whole_call(length))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def relative(ours: Tensor, truth: Tensor) -> float:
    return float((ours.float() - truth).norm() / truth.norm())


@pytest.mark.parametrize("length, causal", [(300, True), (1500, True), (4096, True), (300, False), (1500, False)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_alibi_is_as_exact_as_plain_attention(length, causal, dtype, record_property):
    """The bias costs no more precision than half precision itself: compared with SDPA that has none."""
    heads = 2
    q, k, v = heads_of(1, heads, length, 64, dtype)
    slope = torch.tensor([2**-0.5, 2**-8]).view(-1, 1, 1)  # the steepest is no power of two
    at = torch.arange(length)
    truth = dense(q, k, v, slope * -(at[:, None] - at).abs(), causal)
    bias = LinearBias(tuple(slope.flatten().tolist()), causal)
    ours, _ = kernels.sdpa(attention_module(causal), q, k, v, None, bias=bias, call=whole_call(length))
    plain = F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)
    ratio = relative(ours, truth) / relative(plain, dense(q, k, v, None, causal))
    record_property("ratio", ratio)
    assert ratio <= 2


# ---------------------------------------------------------------- T5


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("buckets, most", [(32, 128), (32, 17), (16, 64), (8, 20), (64, 256), (4, 500)])
def test_t5_buckets(bidirectional, buckets, most):
    distance = torch.arange(-1000, 1001)
    theirs = T5Attention._relative_position_bucket(distance, bidirectional, buckets, most)
    assert torch.equal(bucket(distance, buckets, most, bidirectional), theirs)


def t5_attention(weight: Tensor, causal: bool, buckets: int = 32, most: int = 128) -> T5Attention:
    config = T5Config(
        num_heads=weight.shape[1],
        is_decoder=causal,
        relative_attention_num_buckets=buckets,
        relative_attention_max_distance=most,
    )
    attention = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    attention.relative_attention_bias.weight.data.copy_(weight)
    return attention


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("buckets, most", [(32, 128), (16, 40)])
def test_t5_bias_is_t5s(causal, buckets, most):
    ours = BucketBias(6, buckets, most, not causal, std=1.0, seed=0)
    theirs = t5_attention(ours.weight, causal, buckets, most)
    keys = torch.arange(300)[None]
    assert torch.equal(ours(keys, keys), theirs.compute_bias(300, 300))
    assert torch.equal(ours(keys[:, 250:], keys), theirs.compute_bias(50, 300, past_seen_tokens=250))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert", "bert_decoder"])
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_t5_is_an_explicit_mask(kind, kernel, monkeypatch):
    monkeypatch.setattr(renderings, "BLOCK", 16)
    ids = tokens(2, 40)
    model = tiny(kind)
    model.set_attn_implementation(kernel)
    patch_model(model, scheme="t5", relative_attention_num_buckets=16, relative_attention_max_distance=30)
    weight = model.base_model.posenc_bias.weight
    nn.init.normal_(weight)
    bias = t5_attention(weight, kind != "bert", 16, 30).compute_bias(40, 40).detach()
    theirs = with_mask(kind, ids, bias, kind != "bert")
    torch.testing.assert_close(logits(model, ids), theirs, atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------- rotation


def transformers_rope(
    dim: int, trained: int, target: int | None = None, seq_len: int | None = None, theta: float = 10_000.0, **rope
) -> tuple[Tensor, float]:
    """inv_freq and attention factor as transformers computes them from a config."""
    rope.setdefault("rope_theta", theta)
    if rope["rope_type"] in ("yarn", "llama3", "longrope"):
        rope["original_max_position_embeddings"] = trained
    config = LlamaConfig(
        hidden_size=4 * dim,
        num_attention_heads=4,
        head_dim=dim,
        max_position_embeddings=target or trained,
        rope_parameters=rope,
    )
    if rope["rope_type"] == "default":
        return LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, seq_len=seq_len)


BETAS = dict(beta_fast=4.0, beta_slow=0.5)
"""A ramp that lies within the few pairs of a tiny head."""
BANDS = dict(low_freq_factor=0.5, high_freq_factor=4.0)
ROTATIONS = {
    "rope": (dict(rope_theta=500.0), dict(rope_type="default", rope_theta=500.0)),
    "linear": (dict(factor=4.0), dict(rope_type="linear", factor=4.0)),
    "ntk": (dict(factor=4.0), dict(rope_type="default", rope_theta=10_000 * 4 ** (16 / 14))),
    "yarn": (dict(factor=4.0, **BETAS), dict(rope_type="yarn", factor=4.0, **BETAS)),
    "llama3": (dict(factor=4.0, **BANDS), dict(rope_type="llama3", factor=4.0, **BANDS)),
    "proportional": (
        dict(partial_rotary_factor=0.5),
        dict(rope_type="proportional", partial_rotary_factor=0.5),
    ),
}


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


# ---------------------------------------------------------------- frequencies


def geometry(dim: int, trained: int, theta: float = 10_000.0, rope: dict | None = None) -> Geometry:
    return Geometry(
        hidden_size=4 * dim,
        num_heads=4,
        head_dim=dim,
        rotary_dim=dim,
        trained_length=trained,
        causal=True,
        rope=rope or {"rope_type": "default", "rope_theta": theta},
    )


def rotation(scheme: str, shape: Geometry, **options) -> Rotation:
    found = SCHEMES[scheme](**options).effect(shape).rotation
    assert found is not None
    return found


def same_rotation(ours: Rotation, theirs: tuple[Tensor, float]) -> None:
    torch.testing.assert_close(torch.tensor(ours.inv_freq), theirs[0], rtol=1e-5, atol=0)
    assert ours.attention_scaling == pytest.approx(theirs[1], rel=1e-6)


SHAPES = [(64, 512, 10_000.0), (128, 4096, 10_000.0), (128, 8192, 500_000.0), (80, 2048, 1_000_000.0), (8, 32, 500.0)]


@pytest.mark.parametrize("dim, trained, theta", SHAPES)
@pytest.mark.parametrize("factor", [1.0, 2.0, 4.0, 6.7, 32.0])
def test_frequencies_are_transformers(dim, trained, theta, factor):
    shape = geometry(dim, trained, theta)

    def theirs(**rope):
        return transformers_rope(dim, trained, round(trained * factor), theta=theta, **rope)

    for scheme in ("linear", "yarn", "llama3"):
        bands = dict(low_freq_factor=1.0, high_freq_factor=4.0) if scheme == "llama3" else {}
        ours = rotation(scheme, shape, factor=factor, **bands)
        same_rotation(ours, theirs(rope_type=scheme, factor=factor, **bands))
    larger = theta * factor ** (dim / (dim - 2))
    same_rotation(rotation("ntk", shape, factor=factor), theirs(rope_type="default", rope_theta=larger))
    larger = theta * 3.5 ** (dim / (dim - 2))
    ours = rotation("ntk", shape, factor=factor, alpha=3.5)
    same_rotation(ours, theirs(rope_type="default", rope_theta=larger))


@pytest.mark.parametrize("dim, trained, theta", SHAPES)
@pytest.mark.parametrize(
    "options",
    [
        dict(beta_fast=16.0, beta_slow=2.0),
        dict(truncate=False),
        dict(truncate=False, beta_fast=8.0, beta_slow=0.25),
        dict(beta_fast=2.0, beta_slow=1.9),
        dict(mscale=1.0, mscale_all_dim=0.707),
        dict(mscale=0.707, mscale_all_dim=1.0),
        dict(attention_factor=1.5),
        dict(rope_theta=123_456.0),
    ],
    ids=str,
)
def test_yarn_options_are_transformers(dim, trained, theta, options):
    ours = rotation("yarn", geometry(dim, trained, theta), factor=8.0, **options)
    theirs = transformers_rope(dim, trained, 8 * trained, **{"theta": theta, **options}, rope_type="yarn", factor=8.0)
    same_rotation(ours, theirs)


@pytest.mark.parametrize("low, high", [(1.0, 4.0), (0.5, 2.0), (2.0, 32.0)])
@pytest.mark.parametrize("dim, trained, theta", SHAPES)
def test_llama3_bands_are_transformers(low, high, dim, trained, theta):
    bands = dict(low_freq_factor=low, high_freq_factor=high)
    ours = rotation("llama3", geometry(dim, trained, theta), factor=8.0, **bands)
    theirs = transformers_rope(dim, trained, 8 * trained, theta=theta, rope_type="llama3", factor=8.0, **bands)
    same_rotation(ours, theirs)


@pytest.mark.parametrize("portion", [0.0, 0.1, 0.25, 0.3, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("factor", [1.0, 4.0])
@pytest.mark.parametrize("dim", [8, 64, 80])
def test_proportional_is_transformers(portion, factor, dim):
    ours = rotation("proportional", geometry(dim, 512), partial_rotary_factor=portion, factor=factor)
    keys = dict(rope_type="proportional", partial_rotary_factor=portion, factor=factor)
    same_rotation(ours, transformers_rope(dim, 512, **keys))


def at_length(following: Rotation, length: int) -> Tensor:
    """The frequencies of a query that sees `length` tokens, from the definition of a FollowingRotation."""
    assert isinstance(following, FollowingRotation)
    growth = following.growth(following.stage(torch.tensor(length)))
    return torch.tensor(following.inv_freq) * torch.exp(-growth * torch.tensor(following.weights))


@pytest.mark.parametrize("attention_factor", [None, 1.25])
@pytest.mark.parametrize("factor", [1.0, 4.0, 32.0])
def test_longrope_is_transformers(attention_factor, factor):
    dim, trained = 32, 128
    short = tuple(1 + 0.01 * i for i in range(16))
    long = tuple(1 + 0.9 * i for i in range(16))
    options = dict(short_factor=short, long_factor=long, factor=factor)
    if attention_factor:
        options["attention_factor"] = attention_factor
    ours = rotation("longrope", geometry(dim, trained), **options)
    for length in (1, trained - 1, trained, trained + 1, 10 * trained):
        inv_freq, scale = transformers_rope(
            dim, trained, round(factor * trained), seq_len=length, rope_type="longrope", **options
        )
        torch.testing.assert_close(at_length(ours, length), inv_freq, rtol=1e-5, atol=0)
        assert ours.attention_scaling == pytest.approx(scale, rel=1e-6)


@pytest.mark.parametrize("dim, trained, theta", SHAPES)
@pytest.mark.parametrize("factor", [1.0, 2.0, 8.0])
def test_dynamic_ntk_is_transformers_at_every_length(dim, trained, theta, factor):
    ours = rotation("dynamic_ntk", geometry(dim, trained, theta), factor=factor, step=1)
    for length in (1, trained, trained + 1, trained + 7, 2 * trained, 3 * trained + 1, 16 * trained):
        inv_freq, scale = transformers_rope(
            dim, trained, seq_len=length, theta=theta, rope_type="dynamic", factor=factor
        )
        torch.testing.assert_close(at_length(ours, length), inv_freq, rtol=1e-5, atol=0)
        assert ours.attention_scaling == scale == 1.0


CONFIG_GRADE = {**ROTATIONS, "none": ({}, None)}


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("scheme", CONFIG_GRADE)
def test_a_fresh_model_from_the_patched_config_has_the_same_frequencies(kind, scheme):
    model = patch_model(tiny(kind), scheme=scheme, **CONFIG_GRADE[scheme][0])
    fresh = type(model)(type(model.config)(**model.config.to_dict())).eval()
    assert torch.equal(model.model.rotary_emb.inv_freq, fresh.model.rotary_emb.inv_freq)
    assert model.model.rotary_emb.attention_scaling == fresh.model.rotary_emb.attention_scaling
    fresh.load_state_dict(model.state_dict())
    ids = tokens(2, 50)
    assert torch.equal(logits(model, ids), logits(fresh, ids))


# ---------------------------------------------------------------- dynamic NTK, longrope on a model


def one_layer(**rope) -> PreTrainedModel:
    if not rope:
        return tiny("llama", num_hidden_layers=1)
    return tiny("llama", num_hidden_layers=1, rope_parameters={"rope_theta": 10_000.0, **rope})


@pytest.mark.parametrize("factor", [1.0, 2.0])
@pytest.mark.parametrize("length", [LENGTH + 1, LENGTH + 9, 3 * LENGTH])
def test_dynamic_ntk_last_token_is_transformers(factor, length):
    """With one layer the last token sees only keys of its own stage, which is what a single pass of theirs does."""
    ids = tokens(2, length)
    ours = patch_model(one_layer(), scheme="dynamic_ntk", factor=factor, step=1)
    theirs = one_layer(rope_type="dynamic", factor=factor)
    torch.testing.assert_close(logits(ours, ids)[:, -1], logits(theirs, ids)[:, -1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("step", [1, None])
def test_dynamic_ntk_changes_nothing_up_to_the_trained_length(step):
    model = tiny("llama")
    ids = tokens(2, LENGTH)
    before = logits(model, ids)
    torch.testing.assert_close(logits(patch_model(model, scheme="dynamic_ntk", step=step), ids), before)
    longer = logits(model, torch.cat([ids, ids], 1))
    torch.testing.assert_close(longer[:, :LENGTH], before, atol=1e-4, rtol=1e-4)


def test_longrope_last_token_is_transformers():
    short, long = [1.0, 1.1, 1.2, 1.3], [1.0, 2.0, 3.0, 4.0]
    keys = dict(short_factor=short, long_factor=long, factor=4.0)
    ours = patch_model(one_layer(), scheme="longrope", **keys)
    theirs = one_layer(rope_type="longrope", original_max_position_embeddings=LENGTH, **keys)
    for length in (LENGTH, LENGTH + 1, 2 * LENGTH):
        ids = tokens(2, length)
        torch.testing.assert_close(logits(ours, ids)[:, -1], logits(theirs, ids)[:, -1], atol=1e-4, rtol=1e-4)


def cached(model: PreTrainedModel, ids: Tensor, prompt: int) -> Tensor:
    """Logits of each token after the prompt, decoded one by one."""
    with torch.no_grad():
        out = model(ids[:, :prompt], use_cache=True)
        steps = []
        for i in range(prompt, ids.shape[1]):
            out = model(ids[:, i : i + 1], past_key_values=out.past_key_values, use_cache=True)
            steps.append(out.logits)
    return torch.cat(steps, 1)


@pytest.mark.parametrize(
    "scheme, options, rope",
    [
        ("dynamic_ntk", dict(factor=2.0, step=1), dict(rope_type="dynamic", factor=2.0)),
        (
            "longrope",
            dict(factor=4.0, short_factor=[1.0] * 4, long_factor=[1.0, 2.0, 3.0, 4.0]),
            dict(
                rope_type="longrope",
                factor=4.0,
                short_factor=[1.0] * 4,
                long_factor=[1.0, 2.0, 3.0, 4.0],
                original_max_position_embeddings=LENGTH,
            ),
        ),
    ],
)
def test_cached_decoding_where_transformers_own_goes_wrong(scheme, options, rope, record_property):
    """Theirs keeps keys that were turned by another base; its error is recorded, only ours is asserted."""
    ids = tokens(2, 2 * LENGTH)
    theirs = tiny("llama", rope_parameters={"rope_theta": 10_000.0, **rope})
    full = logits(theirs, ids)[:, LENGTH - 4 :]
    record_property("transformers_error", float((cached(theirs, ids, LENGTH - 4) - full).abs().max()))
    ours = patch_model(tiny("llama"), scheme=scheme, **options)
    full = logits(ours, ids)[:, LENGTH - 4 :]
    torch.testing.assert_close(cached(ours, ids, LENGTH - 4), full, atol=1e-4, rtol=1e-4)


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


# ---------------------------------------------------------------- models whose RoPE is scaled already

NATIVE = dict(
    rope_type="llama3",
    rope_theta=10_000.0,
    factor=8.0,
    original_max_position_embeddings=16,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
)


def scaled_llama() -> PreTrainedModel:
    """head_dim 16, trained at 16 tokens and brought to 128 with llama3 before we get it."""
    return tiny("llama", hidden_size=64, max_position_embeddings=128, rope_parameters=dict(NATIVE))


def native_frequencies() -> np.ndarray:
    keys = {k: v for k, v in NATIVE.items() if k != "original_max_position_embeddings"}
    return transformers_rope(16, 16, 128, **keys)[0].double().numpy()


def yarn_on(freq: np.ndarray, factor: float, length: int, fast: float, slow: float) -> np.ndarray:
    """YaRN on any falling frequencies: its bounds are read off log frequency by interpolation."""
    pairs = np.arange(len(freq))
    turns = np.log(length * freq / (2 * np.pi))
    low, high = (np.interp(-math.log(b), -turns, pairs) for b in (fast, slow))
    low, high = math.floor(low), math.ceil(high)
    ramp = np.clip((pairs - low) / (high - low), 0, 1)
    return freq * (1 - ramp) + freq / factor * ramp


def extended(scheme: str) -> tuple[dict, np.ndarray, float]:
    """Options, the frequencies at factor 4 on top of NATIVE and the attention factor, by hand."""
    old = native_frequencies()
    if scheme == "linear":
        return {}, old / 4, 1.0
    if scheme == "ntk":
        return {}, old * 4.0 ** (-np.arange(8) / 7), 1.0
    if scheme == "llama3":
        turns = 128 * old / (2 * np.pi)
        kept = np.clip((turns - 1) / 3, 0, 1)
        return {}, old / 4 * (1 - kept) + old * kept, 1.0
    fast, slow = 16.0, 0.5
    return dict(beta_fast=fast, beta_slow=slow), yarn_on(old, 4.0, 128, fast, slow), 0.1 * math.log(4) + 1


@pytest.mark.parametrize("scheme", ["linear", "ntk", "llama3", "yarn"])
def test_scaled_model_is_extended_from_where_it_stands(scheme):
    options, wanted, scale = extended(scheme)
    model = patch_model(scaled_llama(), scheme=scheme, factor=4.0, existing="extend", **options)
    found = model.model.rotary_emb.inv_freq.double().numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert model.model.rotary_emb.attention_scaling == pytest.approx(scale, rel=1e-6)
    assert model.config.max_position_embeddings == 512


@pytest.mark.parametrize("scheme", ["linear", "ntk", "llama3", "yarn"])
def test_extension_of_a_scaled_model_loads_as_longrope(scheme):
    model = patch_model(scaled_llama(), scheme=scheme, factor=4.0, existing="extend", **extended(scheme)[0])
    assert model.config.rope_parameters["rope_type"] == "longrope"
    fresh = LlamaForCausalLM(LlamaConfig(**model.config.to_dict())).eval()
    assert torch.equal(model.model.rotary_emb.inv_freq, fresh.model.rotary_emb.inv_freq)
    fresh.load_state_dict(model.state_dict())
    for length in (20, 300):  # within and past what longrope takes for its border
        ids = tokens(1, length)
        torch.testing.assert_close(logits(model, ids), logits(fresh, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("scheme", ["linear", "ntk", "llama3", "yarn", "longrope", "dynamic_ntk"])
def test_extending_a_scaled_model_unasked_warns(scheme):
    options = {} if scheme == "dynamic_ntk" else {"factor": 4.0}
    with pytest.warns(UserWarning, match="scaled already"):
        patch_model(scaled_llama(), scheme=scheme, **options)


@pytest.mark.parametrize("existing", ["extend", "replace"])
def test_saying_what_is_meant_does_not_warn(existing, recwarn):
    patch_model(scaled_llama(), scheme="linear", factor=4.0, existing=existing)
    assert not [w for w in recwarn if "scaled already" in str(w.message)]


@pytest.mark.parametrize("scheme", ["linear", "yarn", "llama3", "ntk"])
def test_replacing_starts_from_plain_rope(scheme):
    """The old scaling is dropped and the length before it is the trained one."""
    model = patch_model(scaled_llama(), scheme=scheme, factor=32.0, existing="replace")
    bands = dict(low_freq_factor=1.0, high_freq_factor=4.0) if scheme == "llama3" else {}
    rope = dict(rope_type=scheme, factor=32.0, **bands)
    if scheme == "ntk":
        rope = dict(rope_type="default", rope_theta=10_000 * 32 ** (16 / 14))
    inv_freq, scale = transformers_rope(16, 16, 512, **rope)
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, inv_freq, rtol=1e-5, atol=0)
    assert model.model.rotary_emb.attention_scaling == pytest.approx(scale)
    assert model.config.max_position_embeddings == 512


def test_dynamic_ntk_on_a_scaled_model_stretches_what_it_has():
    model = patch_model(scaled_llama(), scheme="dynamic_ntk", step=1, existing="extend")
    following = model.model.posenc.rotation
    wanted = native_frequencies() * 2.0 ** (-np.arange(8) / 7)
    np.testing.assert_allclose(at_length(following, 256).double().numpy(), wanted, rtol=1e-5)
    np.testing.assert_allclose(at_length(following, 128).double().numpy(), native_frequencies(), rtol=1e-5)


@pytest.mark.parametrize(
    "rope",
    [
        dict(rope_type="linear", factor=4.0),
        dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, **BETAS),
        dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, mscale=1.0, mscale_all_dim=0.5),
        dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, truncate=False),
        NATIVE,
        dict(
            rope_type="longrope",
            factor=4.0,
            short_factor=[1.0, 1.5, 2.0, 2.5] * 2,
            long_factor=[1.0, 1.5, 2.0, 2.5] * 2,
            original_max_position_embeddings=32,
        ),
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_every_kind_of_scaling_is_read_as_transformers_reads_it(rope):
    """`linear` by 1 changes nothing, so that what it finds is what the model had."""
    rope = {"rope_theta": 10_000.0, **rope}
    model = tiny("llama", hidden_size=64, max_position_embeddings=128, rope_parameters=rope)
    own = SimpleNamespace(
        inv_freq=model.model.rotary_emb.inv_freq.clone(), scale=model.model.rotary_emb.attention_scaling
    )
    patch_model(model, scheme="linear", factor=1.0, existing="extend")
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, own.inv_freq, rtol=1e-5, atol=0)
    assert model.model.rotary_emb.attention_scaling == pytest.approx(own.scale, rel=1e-6)
