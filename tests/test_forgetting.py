"""FoX and CABLE against the dense matrix of what lies between a query and a key, summed pair by pair."""

import pytest
import torch
from cells import LENGTH, tiny, tokens
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import eager_mask

from hf_posenc import PosencError, UnsupportedCell, patch_model, set_rendering
from hf_posenc.core.effects import Geometry
from hf_posenc.runtime import forgetting
from hf_posenc.runtime.attention_call import Call
from hf_posenc.schemes.forgetting import Forgetting

N = 50
OPTIONS = {"fox": {"constant": 1.0, "std": 0.3}, "cable": {"constant": -1.0, "std": 0.3, "seed": 1}}


def left_of_the_past(scheme, gate):
    """The logarithm of what each token leaves, as the papers write it."""
    return torch.sigmoid(gate).log() if scheme == "fox" else -torch.log1p(gate.exp())


def between(log_left):
    """(rows, heads, tokens) -> the bias of each pair: the sum over the tokens after the key, up to the query."""
    length = log_left.shape[-1]
    bias = log_left.new_full((*log_left.shape, length), -torch.inf)
    for i in range(length):
        for j in range(i + 1):
            bias[..., i, j] = log_left[..., j + 1 : i + 1].sum(-1)
    return bias


def reference(kind, scheme, model, ids):
    """Logits of a model without positions, whose scores get the dense bias of its own hidden states, in fp64."""
    ours = model.base_model.posenc_bias
    twin = patch_model(tiny(kind), "none")
    layers = [m for m in twin.modules() if hasattr(m, "layer_idx") and hasattr(m, "is_causal")]
    seen = {}
    for index, layer in enumerate(layers):

        def look(module, args, kwargs, index=index):
            states = args[0] if args else kwargs["hidden_states"]
            gate = states.double() @ ours.weight[index].double().mT + ours.constant[index].double()
            seen[module.layer_idx] = between(left_of_the_past(scheme, gate).mT)

        layer.register_forward_pre_hook(look, with_kwargs=True)

    def attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1).double(), value.repeat_interleave(groups, 1).double()
        scores = query.double() @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        weights = (scores + seen[module.layer_idx]).softmax(-1)
        return (weights @ value).transpose(1, 2).to(query.dtype), None

    AttentionInterface.register("forgetting_reference", attention)
    AttentionMaskInterface.register("forgetting_reference", eager_mask)
    twin.config._attn_implementation = "forgetting_reference"
    with torch.no_grad():
        return twin(ids, use_cache=False).logits


def logits(model, ids, **kwargs):
    with torch.no_grad():
        return model(ids, **kwargs).logits


@pytest.mark.parametrize("scheme, kind", [("fox", "llama"), ("fox", "gpt2"), ("cable", "llama")])
def test_against_the_dense_sums(scheme, kind):
    model, ids = patch_model(tiny(kind), scheme, **OPTIONS[scheme]), tokens(2, N)
    meant = reference(kind, scheme, model, ids)
    torch.testing.assert_close(logits(model, ids), meant, atol=1e-4, rtol=1e-4)
    with torch.enable_grad():  # the way that gradients take
        torch.testing.assert_close(model(ids).logits.detach(), meant, atol=1e-4, rtol=1e-4)
    cache, parts = DynamicCache(config=model.config), []
    for part in ids.split([20, 1, 1, 9, *[1] * 19], 1):
        parts.append(logits(model, part, past_key_values=cache, use_cache=True))
    torch.testing.assert_close(torch.cat(parts, 1), meant, atol=1e-4, rtol=1e-4)
    set_rendering(model, "columns")
    torch.testing.assert_close(logits(model, ids), meant, atol=1e-4, rtol=1e-4)
    model.set_attn_implementation("hf_posenc_eager")
    torch.testing.assert_close(logits(model, ids), meant, atol=1e-4, rtol=1e-4)
    set_rendering(model, "blocks")
    model.set_attn_implementation("hf_posenc_sdpa")
    with pytest.raises(PosencError, match="row, columns"):
        model(ids)


@pytest.mark.parametrize("scheme", OPTIONS)
def test_nothing_is_forgotten_at_first(scheme):
    ids = tokens(2, LENGTH)
    started, none = logits(patch_model(tiny("llama"), scheme), ids), logits(patch_model(tiny("llama"), "none"), ids)
    assert 0 < (started - none).abs().max() < 0.05  # a position that is off by one gives more than 0.1


def call_of(states, bias):
    at = torch.arange(states.shape[1])[None]
    return Call(at, at, 0, gates=bias(states, 1))


@pytest.mark.parametrize("sign", [1, -1])
def test_gradients_are_those_of_finite_differences(sign):
    torch.manual_seed(0)
    shape = Geometry(hidden_size=6, num_heads=4, head_dim=8, rotary_dim=8, trained_length=32, causal=True, layers=2)
    bias = Forgetting(shape, sign, 0.3, 0.5, 0)
    for name, parameter in list(bias.named_parameters()):
        setattr(bias, name, nn.Parameter(parameter.detach().double()))
    q, k, v = (torch.randn(2, heads, 12, 8).double().requires_grad_() for heads in (4, 2, 2))
    states = torch.randn(2, 12, 6).double().requires_grad_()

    def run(q, k, v, states, *parameters):
        live = dict(zip(("weight", "constant"), parameters, strict=True))
        said = torch.func.functional_call(bias, live, (states, 1))
        at = torch.arange(12)[None]
        return forgetting.attend(q, k, v, None, Call(at, at, 0, gates=said), 0.3, True, 0.0)

    inputs = (q, k, v, states, bias.weight, bias.constant)
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)
    dense = torch.stack([q[:, h] @ k[:, h // 2].mT for h in range(4)], 1) * 0.3 + between(bias(states, 1))
    meant = dense.softmax(-1) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(run(*inputs), meant.transpose(1, 2), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("dtype, most", [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_half_precision_adds_up_in_fp32(dtype, most):
    """Steep forgetting over a long text: sums of thousands, of which neighbours differ by little."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 2000, 16).to(dtype) for _ in range(3))
    said = -2 * torch.rand(1, 2, 2000)
    at = torch.arange(2000)[None]
    call = Call(at, at, 0, gates=said)
    sums = said.double().cumsum(-1)
    bias = (sums[..., :, None] - sums[..., None, :]).masked_fill(torch.ones(2000, 2000).triu(1).bool(), -torch.inf)
    meant = ((q.double() @ k.double().mT / 4 + bias).softmax(-1) @ v.double()).transpose(1, 2)
    for rendering in forgetting.RENDERINGS:
        found = forgetting.attend(q, k, v, None, call, 0.25, True, 0.0, rendering)
        assert (found.double() - meant).abs().max() < most


def test_encoders_and_looking_ahead_are_refused():
    with pytest.raises(UnsupportedCell, match="encoder"):
        patch_model(tiny("bert"), "fox")
    model, ids = patch_model(tiny("llama"), "fox"), tokens(1, 9)
    with pytest.raises(PosencError, match="see ahead"):
        model(ids, attention_mask=torch.zeros(1, 1, 9, 9))


def test_a_cache_that_others_filled_is_refused():
    plain, model, ids = tiny("llama"), patch_model(tiny("llama"), "fox"), tokens(1, 9)
    cache = plain(ids[:, :5], use_cache=True).past_key_values
    with pytest.raises(PosencError, match="say of the past"):
        model(ids[:, 5:], past_key_values=cache)
