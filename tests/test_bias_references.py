"""ALiBi and T5's bias against explicit masks, transformers' own models and attention written out."""

import math

import pytest
import torch
import torch.nn.functional as F
from cells import tiny, tokens
from references import logits
from torch import Tensor, nn
from transformers import T5Config
from transformers.models.bert.modeling_bert import eager_attention_forward  # noqa: F401  looked up by our kernel
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from hf_posenc import patch_model
from hf_posenc.runtime import kernels, renderings
from hf_posenc.runtime.attention_call import Call
from hf_posenc.schemes.alibi import LinearBias, slopes
from hf_posenc.schemes.t5 import BucketBias, bucket

LOWEST = torch.finfo(torch.float32).min


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
