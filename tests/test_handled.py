"""What others do to a live model after the patch: they initialize, move layers, hang hooks on it, trace it."""

import copy
import pickle
from functools import partial

import pytest
import torch
from cells import LENGTH, tiny, tokens
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import DynamicCache

from hf_posenc import PosencError, patch_model

FACTOR = {"factor": 4.0}


def patched_model(scheme, kind="llama", **options):
    return patch_model(tiny(kind), scheme, trained_length=LENGTH, **options)


def logits(model, ids, **given):
    with torch.no_grad():
        return model(ids, use_cache=False, **given).logits


@pytest.mark.parametrize(
    ("scheme", "options"), [("linear", FACTOR), ("yarn", FACTOR), ("none", {}), ("clip", {}), ("dynamic_ntk", {})]
)
def test_frequencies_stay_when_weights_are_initialized_anew(scheme, options):
    model, ids = patched_model(scheme, **options), tokens(1, 50)
    before = logits(model, ids)
    copied = copy.deepcopy(model).double().float()
    for one in (model, copied):
        one.post_init()
        assert torch.equal(logits(one, ids), before)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    for part in (*model.modules(), *model.parameters()):
        vars(part).pop("_is_hf_initialized", None)
    model.init_weights()
    assert not torch.equal(logits(model, ids), before)
    model.load_state_dict(weights)
    assert torch.equal(logits(model, ids), before)


def test_a_model_whose_first_layer_was_moved_is_refused_where_positions_are_added_to_it():
    model, ids = patched_model("sinusoidal", target_length=64), tokens(1, 20)
    before, layers = logits(model, ids), model.model.layers
    layers[0], layers[1] = layers[1], layers[0]
    with pytest.raises(PosencError, match="another layer has come to be the first"):
        logits(model, ids)
    layers[0], layers[1] = layers[1], layers[0]
    assert torch.equal(logits(model, ids), before)
    del layers[0]
    with pytest.raises(PosencError, match="unpatch_model"):
        logits(model, ids)


def test_a_copy_of_the_first_layer_adds_no_positions():
    model, ids, plain = patched_model("sinusoidal", target_length=64), tokens(1, 20), tiny("llama")
    model.model.layers.append(copy.deepcopy(model.model.layers[0]))
    plain.model.layers.append(copy.deepcopy(plain.model.layers[0]))
    model.config.num_hidden_layers = plain.config.num_hidden_layers = 3
    patch_model(plain, "sinusoidal", trained_length=LENGTH, target_length=64)
    assert torch.equal(logits(model, ids), logits(plain, ids))


def test_a_copy_in_the_place_of_the_first_layer_adds_them():
    model, ids = patched_model("sinusoidal", target_length=64), tokens(1, 20)
    before, layers = logits(model, ids), model.model.layers
    layers[0] = copy.deepcopy(layers[0])
    assert torch.equal(logits(model, ids), before)


@pytest.mark.parametrize("wrap", [checkpoint_wrapper, partial(torch.compile, backend="eager")])
def test_wrapped_layers_get_their_positions(wrap):
    """As FSDP, recomputation and compilation layer by layer wrap them."""
    model, ids = patched_model("sinusoidal", target_length=64), tokens(1, 20)
    before, layers = logits(model, ids), model.model.layers
    for place, layer in enumerate(layers):
        layers[place] = wrap(layer)
    assert torch.equal(logits(model, ids), before)


@pytest.mark.parametrize(("scheme", "kind"), [("rope", "gpt2"), ("dynamic_ntk", "llama"), ("fire", "llama")])
def test_layers_may_be_pruned_after_the_patch(scheme, kind):
    """The first layer of all is gone, and positions are changed in place between two passes."""
    model, plain, ids = patched_model(scheme, kind), tiny(kind), tokens(1, 20)
    for one in (model, plain):
        body = one.base_model
        layers = body.layers if kind == "llama" else body.h
        del layers[0]
        one.config.num_hidden_layers = 1
        for part in layers.modules():
            if hasattr(part, "layer_idx"):
                part.layer_idx = 0
    patch_model(plain, scheme, trained_length=LENGTH)
    plain.load_state_dict(model.state_dict())
    at = torch.arange(20)[None]
    for gap in (0, 30, 5):
        at.copy_(torch.arange(20)[None] + gap * (torch.arange(20) > 9))
        assert torch.equal(logits(model, ids, position_ids=at), logits(plain, ids, position_ids=at.clone()))
    found, wanted = DynamicCache(config=model.config), DynamicCache(config=plain.config)
    for part in (ids, ids[:, :1], ids[:, :3]):
        with torch.no_grad():
            assert torch.equal(*(one(part, past_key_values=c).logits for one, c in ((model, found), (plain, wanted))))


def test_a_copied_layer_shares_what_its_model_trains():
    model = patched_model("kerple")
    model.model.layers.append(copy.deepcopy(model.model.layers[1]))
    whole = copy.deepcopy(model)
    for one in (model, whole):
        assert all(layer.self_attn.posenc_link.root is one.model for layer in one.model.layers)


@pytest.mark.parametrize("scheme", ["dynamic_ntk", "alibi", "transformer_xl"])
def test_torch_jit_is_refused(scheme):
    """What it wrote down at one length was 4 to 8 off at another."""
    model = patched_model(scheme)
    model.config.use_cache, model.config.return_dict = False, False
    with pytest.raises(PosencError, match=r"torch\.export"):
        torch.jit.trace(model, tokens(1, 9), check_trace=False)


@pytest.mark.parametrize(
    ("scheme", "options"), [("yarn", FACTOR), ("alibi", {}), ("sinusoidal", {"target_length": 64})]
)
def test_weights_may_be_offloaded_and_stay_again(scheme, options):
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_module

    model, ids = patched_model(scheme, **options), tokens(1, 50)
    before, weights = logits(model, ids), model.state_dict()
    cpu_offload(model)
    assert torch.equal(logits(model, ids), before)
    remove_hook_from_module(model, recurse=True)
    model.load_state_dict(weights, assign=True)
    assert torch.equal(logits(model, ids), before)
    assert torch.equal(logits(pickle.loads(pickle.dumps(model)), ids), before)
