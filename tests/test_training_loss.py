"""The loss without all logits: the model's own, to rounding, with its gradients, for a fraction of the memory."""

import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers
from cells import tiny, tokens
from forked import peak_of, result_of
from torch import nn

from hf_posenc import PosencError, patch_model
from hf_posenc.training.loss import LossHead, Wanted, linear_loss, refuse_other_loss, shift_labels
from hf_posenc.training.rows import IGNORED


def problem(bias=True):
    torch.manual_seed(0)
    hidden = torch.randn(700, 16, requires_grad=True)
    layer = nn.Linear(16, 50, bias=bias)
    targets = torch.randint(50, (700,))
    targets[::7] = IGNORED
    return hidden, layer, targets


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [None, 1, 64, 699])
@pytest.mark.parametrize("weighed", [True, False])
def test_parts_are_cross_entropy(size, bias, weighed):
    hidden, layer, targets = problem(bias=bias)
    counted = torch.rand(700) if weighed else torch.ones(700)
    weights = [hidden, *layer.parameters()]
    each = F.cross_entropy(layer(hidden), targets, reduction="none", ignore_index=IGNORED)
    own = (each * counted).sum()
    found = linear_loss(hidden, layer.weight, layer.bias, targets, counted if weighed else None, size)
    torch.testing.assert_close(found, own, rtol=1e-6, atol=0)
    for a, b in zip(torch.autograd.grad(3 * found, weights), torch.autograd.grad(3 * own, weights), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_gradients_are_taken_where_they_are_wanted_only():
    hidden, layer, targets = problem()
    layer.requires_grad_(False)
    linear_loss(hidden, layer.weight, layer.bias, targets).backward()
    assert hidden.grad is not None and layer.weight.grad is None
    with torch.no_grad():
        assert not linear_loss(hidden, layer.weight, layer.bias, targets).requires_grad


def test_nothing_to_predict_is_nothing():
    hidden, layer, targets = problem()
    found = linear_loss(hidden, layer.weight, layer.bias, torch.full_like(targets, IGNORED))
    found.backward()
    assert found == 0 and not hidden.grad.any() and not layer.weight.grad.any()


@pytest.mark.parametrize("autocast", [True, False])
def test_the_sum_is_taken_in_fp32_whatever_the_logits_are_in(autocast):
    """Summed in bf16, 4096 tokens are some hundredths of a nat off each, and their loss has eight bits."""
    torch.manual_seed(0)
    layer, hidden = nn.Linear(16, 50), torch.randn(4096, 16)
    targets = torch.randint(50, (4096,))
    if not autocast:
        layer, hidden = layer.bfloat16(), hidden.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        logits = layer(hidden)
        head = LossHead(SimpleNamespace(get_output_embeddings=lambda: layer))
        with head.expecting(Wanted(targets[None])):
            found = layer(hidden[None])
    assert logits.dtype == torch.bfloat16 and found.dtype == torch.float32
    own = F.cross_entropy(logits.double(), targets, reduction="sum")
    torch.testing.assert_close(found.sum().double(), own, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_a_head_gives_the_models_own_loss_and_gradients(kind):
    model, other = tiny(kind), tiny(kind)
    ids, labels = tokens(3, 20), tokens(3, 20)
    labels[:, ::4] = IGNORED
    targets = shift_labels(labels) if kind != "bert" else labels
    own = other(ids, labels=labels).loss
    own.backward()
    head = LossHead(model)
    with head.expecting(Wanted(targets)):
        found = model(ids).logits.sum() / (targets != IGNORED).sum()
    found.backward()
    torch.testing.assert_close(found, own, rtol=1e-5, atol=0)
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        if b.grad is None:
            assert a.grad is None, name
        else:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6, msg=name)
    torch.testing.assert_close(model(ids).logits, other(ids).logits)  # logits again, outside
    head.remove()
    assert "forward" not in vars(head.layer)


def test_answers_weigh_more():
    model, ids = tiny("llama"), tokens(2, 16)
    targets = shift_labels(ids)
    answers = torch.zeros(2, 16, dtype=torch.bool)
    answers[0, 3:6] = True
    logits = model(ids).logits
    each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORED)
    expected = (each * torch.where(answers.flatten(), 5.0, 1.0)).sum()
    head = LossHead(model)
    with head.expecting(Wanted(targets, answers, 5.0)):
        found = model(ids).logits.sum()
    torch.testing.assert_close(found, expected)


def test_autocast_is_heeded():
    model, ids = tiny("llama"), tokens(2, 16)
    head = LossHead(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        own = F.cross_entropy(model(ids).logits.float().flatten(0, 1), shift_labels(ids).flatten(), reduction="sum")
        with head.expecting(Wanted(shift_labels(ids))):
            found = model(ids).logits.sum()
    found.backward()
    torch.testing.assert_close(found, own, rtol=1e-2, atol=0)
    assert found.dtype == torch.float32 and model.lm_head.weight.grad.dtype == torch.float32


def test_a_model_that_changes_its_logits_is_refused():
    config = transformers.GraniteConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64,
        logits_scaling=8.0,
    )  # fmt: skip
    model = transformers.GraniteForCausalLM(config).eval()
    batch = {"input_ids": tokens(1, 16), "labels": tokens(1, 16)}
    with pytest.raises(PosencError, match="changes its logits after"):
        refuse_other_loss(model, LossHead(model), batch, causal=True)
    plain = tiny("llama")
    refuse_other_loss(plain, LossHead(plain), batch, causal=True)
    patched = patch_model(tiny("gpt2"), "alibi")
    refuse_other_loss(patched, LossHead(patched), batch, causal=True)


def test_a_head_that_is_no_linear_layer_is_refused():
    model = tiny("llama")
    model.lm_head = nn.Sequential(model.lm_head)
    with pytest.raises(PosencError, match="full_logits"):
        LossHead(model)


def memory_of_a_step(way):
    sizes = dict(vocab_size=16384, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    ids, head = torch.randint(16384, (1, 4096)), LossHead(model)

    def loss(ids):
        if way == "full":
            return model(ids, labels=ids).loss
        with head.expecting(Wanted(shift_labels(ids))):
            return model(ids).logits.sum()

    loss(ids[:, :8]).backward()
    return peak_of(lambda: loss(ids).backward())


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read in Linux's units")
def test_memory_is_a_fraction():
    """benchmarks/benchmark.py has the figure at full size; here all logits would be 256 MB, several times over."""
    extra = {way: result_of(partial(memory_of_a_step, way)) for way in ("full", "head")}
    assert extra["full"] > 500 and extra["head"] < extra["full"] / 4, extra
