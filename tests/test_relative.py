"""Relative terms that look at content, against their papers' definitions, pair by pair."""

import math

import pytest
import torch
from cells import tiny, tokens
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import eager_mask
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

from hf_posenc import PosencError, patch_model
from hf_posenc.core.effects import Geometry
from hf_posenc.runtime import relative, relative_texts
from hf_posenc.runtime.attention_call import Call
from hf_posenc.schemes import Deberta, Shaw, TransformerXL
from hf_posenc.schemes.deberta import log_bucket

N = 24
SHAPE = Geometry(
    hidden_size=12,
    num_heads=4,
    head_dim=8,
    rotary_dim=8,
    trained_length=32,
    causal=True,
    layers=2,
    initializer_range=0.4,
)
SCHEMES = {
    "shaw": Shaw(max_distance=5),
    "shaw-values": Shaw(max_distance=5, relative_values=True),
    "shaw-queries": Shaw(max_distance=5, relative_queries=True),
    "transformer_xl": TransformerXL(),
    "deberta": Deberta(position_buckets=8, max_relative_positions=20),
}


def clip(x, most):
    return max(-most, min(most, x))


def dense(scheme, own, layer, q, k, v, scaling, seen):
    """Outputs pair by pair, (batch, heads, queries, channels), in the precision of its inputs."""
    length, size = q.shape[2:]
    scores = q.new_zeros(*q.shape[:3], length)
    added = v.new_zeros(length, length, size)
    for i in range(length):
        for j in range(length):
            q_i, k_j = q[:, :, i], k[:, :, j]
            if scheme.name == "shaw":  # e_ij = x_i W_Q (x_j W_K + a_ij)
                a = own["keys"][layer, clip(j - i, 5) + 5]
                found = (q_i * (k_j + a)).sum(-1) + ((k_j * a).sum(-1) if scheme.relative_queries else 0)
                if scheme.relative_values:
                    added[i, j] = own["values"][layer, clip(j - i, 5) + 5]
            elif scheme.name == "transformer_xl":
                hidden = own["weight"].shape[-1]
                angles = [(i - j) / 10_000 ** (2 * c / hidden) for c in range(hidden // 2)]
                waves = q.new_tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles])
                r = own["weight"][layer] @ waves
                u, w = own["u"][layer], own["v"][layer]
                found = (q_i * k_j).sum(-1) + (q_i * r).sum(-1) + (u * k_j).sum(-1) + (w * r).sum(-1)
            else:
                there, back = (int(make_log_bucket_position(torch.tensor(d), 8, 20)) for d in (i - j, j - i))
                row, back_row = (min(max(x + 8, 0), 15) for x in (there, back))
                k_r = own["to_key"][layer] @ own["table"][row]
                q_r = own["to_query"][layer] @ own["table"][back_row]
                found = ((q_i * k_j).sum(-1) + (q_i * k_r).sum(-1) + (k_j * q_r).sum(-1)) / math.sqrt(3)
            scores[..., i, j] = found * scaling
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return weights @ v + torch.einsum("bhij,ijc->bhic", weights, added)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(relative, "BLOCK", 16)
    monkeypatch.setattr(relative_texts, "BLOCK", 16)


def module_of(scheme, causal=True):
    bias = scheme.effect(SHAPE).bias
    for name, parameter in list(bias.named_parameters()):
        setattr(bias, name, nn.Parameter(parameter.detach().double()))
    for name, buffer in list(bias.named_buffers()):
        setattr(bias, name, buffer.double())
    layer = nn.Module()
    layer.is_causal = causal
    return bias, layer


def inputs(length, groups=2):
    torch.manual_seed(0)
    return [torch.randn(2, heads, length, 8).double().requires_grad_() for heads in (4, 4 // groups, 4 // groups)]


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("causal", [True, False])
def test_against_the_definition(name, causal):
    scheme, length = SCHEMES[name], 17  # the last block has one query
    bias, layer = module_of(scheme, causal)
    q, k, v = inputs(length)
    at = torch.arange(length)[None]
    seen = torch.ones(length, length).tril().bool() if causal else torch.ones(length, length).bool()
    given = dict(causal=causal, weighs=False, scaling=0.3)
    found, _ = relative.attend(layer, q, k, v, None, Call(at, at, 0), bias, 1, **given)
    own = {n: p.detach().requires_grad_() for n, p in bias.named_parameters()}
    twice = [x.repeat_interleave(2, 1) for x in (k, v)]
    meant = dense(scheme, own, 1, q, *twice, 0.3, seen)
    tolerance = 1e-6 if name == "transformer_xl" else 1e-12  # its frequencies are fp32
    torch.testing.assert_close(found, meant.transpose(1, 2), atol=tolerance, rtol=tolerance)
    weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).double()
    ours = torch.autograd.grad((found * weight).sum(), [q, k, v, *bias.parameters()])
    theirs = torch.autograd.grad((meant.transpose(1, 2) * weight).sum(), [q, k, v, *own.values()])
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e4 * tolerance, rtol=1e-6)
    output, weights = relative.attend(layer, q, k, v, None, Call(at, at, 0), bias, 1, **{**given, "weighs": True})
    torch.testing.assert_close(output, found, atol=1e-10, rtol=0)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, length).double())


def masks_of(kind, length):
    """A mask, the positions, and which tokens are no padding, of two rows."""
    text, at = torch.zeros(2, length, dtype=torch.long), torch.arange(length).expand(2, -1)
    if kind == "left":
        text[0, :7] = -1
        at = torch.stack([(at[0] - 7).clamp(min=0), at[1]])
    elif kind == "right":
        text[1, -9:] = -1
    elif kind == "packed":
        text[:, 23:], text[1, 40:] = 1, 2
        at = torch.stack([torch.cat([torch.arange((row == n).sum()) for n in row.unique()]) for row in text])
    seen = (text[:, None, :] == text[:, :, None]) & torch.ones(length, length).tril().bool()
    return (seen & (text >= 0)[:, None, :])[:, None], at, text >= 0


@pytest.mark.parametrize("kind", ["plain", "left", "right", "packed"])
@pytest.mark.parametrize("name", ["shaw", "shaw-queries", "transformer_xl", "deberta"])
@torch.no_grad()
def test_texts_by_the_kernel_are_those_in_blocks(name, kind, monkeypatch):
    bias, layer = module_of(SCHEMES[name])
    q, k, v = inputs(53)
    mask, at, real = masks_of(kind, 53)
    mask = None if kind == "plain" else mask
    given, used = dict(causal=True, weighs=False, scaling=0.3), []
    monkeypatch.setattr(relative, "of_text", lambda *x: used.append(x) or relative_texts.attend(*x))
    found, _ = relative.attend(layer, q, k, v, mask, Call(at, at, 0), bias, 1, **given)
    assert len(used) == {"plain": 1, "left": 2, "right": 2, "packed": 5}[kind]
    monkeypatch.setattr(relative, "fits", lambda *x: False)
    meant, _ = relative.attend(layer, q, k, v, mask, Call(at, at, 0), bias, 1, **given)
    torch.testing.assert_close(found[real], meant[real], atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", ["shaw", "transformer_xl", "deberta"])
@torch.no_grad()
def test_texts_in_half_precision(name):
    bias, layer = module_of(SCHEMES[name])
    q, k, v = inputs(53)
    at = torch.arange(53)[None]
    meant, _ = relative.attend(layer, q, k, v, None, Call(at, at, 0), bias, 1, causal=True, weighs=False)
    halves = [x.bfloat16() for x in (q, k, v)]
    found, _ = relative.attend(layer, *halves, None, Call(at, at, 0), bias, 1, causal=True, weighs=False)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), meant, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("name", SCHEMES)
def test_gradients_are_those_of_finite_differences(name):
    bias, layer = module_of(SCHEMES[name])
    q, k, v = inputs(19)
    at = torch.arange(19)[None]
    names = [n for n, _ in bias.named_parameters()]

    def run(q, k, v, *parameters):
        live = dict(zip(names, parameters, strict=True))

        def found(*given):
            return torch.func.functional_call(bias, live, given)

        return relative.attend(layer, q, k, v, None, Call(at, at, 0), found, 1, causal=True, weighs=False)[0]

    assert torch.autograd.gradcheck(run, (q, k, v, *bias.parameters()), fast_mode=True)


def test_buckets_are_those_of_deberta():
    distance = torch.arange(-700, 701)
    for buckets, most in ((256, 512), (32, 128), (8, 20)):
        theirs = make_log_bucket_position(distance, buckets, most)
        inside = distance.abs() <= most
        assert torch.equal(log_bucket(distance, buckets, most)[inside], theirs.long()[inside])


def test_nothing_of_the_size_of_all_pairs_is_kept():
    bias, layer = module_of(SCHEMES["shaw"])
    q, k, v = inputs(200)
    at, held = torch.arange(200)[None], []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t.numel()) or t, lambda t: t):
        relative.attend(layer, q, k, v, None, Call(at, at, 0), bias, 1, causal=True, weighs=False)
    assert max(held, default=0) <= q.numel() < 4 * 200 * 200


class Largest(TorchDispatchMode):
    """Notes how many numbers the largest tensor holds that is made."""

    most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for x in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(x, torch.Tensor):
                self.most = max(self.most, x.untyped_storage().nbytes() // x.itemsize)
        return made


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("name", SCHEMES)
def test_no_tensor_is_of_the_size_of_all_pairs(name, trains):
    bias, layer = module_of(SCHEMES[name])
    length, at = 400, torch.arange(400)[None]
    with Largest() as seen, torch.set_grad_enabled(trains):
        q, k, v = inputs(length)
        out, _ = relative.attend(layer, q, k, v, None, Call(at, at, 0), bias, 1, causal=True, weighs=False)
        if trains:
            out.sum().backward()
    assert q.numel() <= seen.most < q.shape[0] * q.shape[1] * length**2 / 4


@pytest.mark.parametrize("kind, name", [("llama", "shaw-values"), ("bert", "transformer_xl"), ("gpt2", "deberta")])
def test_models_against_the_definition(kind, name):
    """Whole models, full and cached: attention is replaced by the definition, and nothing else."""
    scheme, ids = SCHEMES[name], tokens(2, N)
    model = patch_model(tiny(kind), scheme)
    own = {n: p.detach().double() for n, p in model.base_model.posenc_bias.named_parameters()}
    twin = patch_model(tiny(kind), "none")
    at = torch.arange(N)
    seen = at <= at[:, None] if kind != "bert" else torch.ones(N, N, dtype=torch.bool)

    def attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
        groups = query.shape[1] // key.shape[1]
        k, v = key.repeat_interleave(groups, 1).double(), value.repeat_interleave(groups, 1).double()
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        layer = next(places)
        return dense(scheme, own, layer, query.double(), k, v, scaling, seen).transpose(1, 2).to(query.dtype), None

    AttentionInterface.register("relative_reference", attention)
    AttentionMaskInterface.register("relative_reference", eager_mask)
    twin.config._attn_implementation = "relative_reference"
    places = iter(range(2))
    with torch.no_grad():
        meant = twin(ids, **({} if kind == "bert" else {"use_cache": False})).logits
        torch.testing.assert_close(model(ids).logits, meant, atol=2e-4, rtol=1e-4)
        if kind != "bert":
            cache = DynamicCache(config=model.config)
            parts = [model(x, past_key_values=cache, use_cache=True).logits for x in ids.split([9, 1, 1, 8, 5], 1)]
            torch.testing.assert_close(torch.cat(parts, 1), meant, atol=2e-4, rtol=1e-4)


def test_options_that_cannot_work():
    with pytest.raises(PosencError, match="position_buckets=7"):
        Deberta(position_buckets=7)
    with pytest.raises(PosencError, match="max_distance"):
        Shaw(max_distance=0)
