"""Models that cannot be patched are refused with a reason, and left as they were, to the last bit."""

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from cells import CELLS, KINDS, VOCAB, effect, options, tiny
from huggingface_hub.errors import StrictDataclassError
from refusals import FAR, Snapshot, assert_refused, logits
from torch import nn

from hf_posenc import (
    PosencError,
    UnsupportedCell,
    UnsupportedModel,
    check_model,
    is_patched,
    patch_model,
    unpatch_model,
)
from hf_posenc.core.effects import FollowingRotation
from hf_posenc.families import FAMILIES


@pytest.mark.parametrize("scheme", ["rope", "yarn", "dynamic_ntk", "longrope", "proportional"])
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_odd_heads_cannot_be_rotated(kind, scheme):
    model = tiny(kind, hidden_size=36)
    assert_refused(model, scheme, "9", "even", "alibi", **options(scheme))
    assert_refused(patch_model(model, "alibi"), scheme, "9", "even", **options(scheme))


def test_transformers_itself_builds_no_rope_with_odd_heads():
    """So that there is no such model for patch_model to refuse."""
    with pytest.raises(StrictDataclassError, match="even rotary dimension"):
        tiny("llama", head_dim=9)


def needs_two_pairs(scheme: str, kind: str) -> bool:
    """Whether a scheme tells fast pairs from slow ones: such a one may refuse to make sense of a single pair."""
    rotation = effect(scheme, kind).rotation
    if rotation is None or not all(rotation.inv_freq):
        return False
    own = [10_000 ** (-2 * i / 8) for i in range(4)]
    ratios = [mine / theirs for mine, theirs in zip(rotation.inv_freq, own, strict=True)]
    return isinstance(rotation, FollowingRotation) or max(ratios) > min(ratios) * (1 + 1e-6)


@pytest.mark.parametrize("scheme, kind", [(s, k) for s, k in CELLS if k in ("llama", "gpt2")])
def test_heads_of_two_channels_have_one_pair(scheme, kind):
    sizes = {"head_dim": 2} if kind == "llama" else {"hidden_size": 8}
    if needs_two_pairs(scheme, kind):
        try:
            patch_model(tiny(kind, **sizes), scheme, **options(scheme))
        except UnsupportedCell as refusal:
            assert "two pairs" in str(refusal)
            return
    assert logits(patch_model(tiny(kind, **sizes), scheme, **options(scheme))).isfinite().all()


@pytest.mark.parametrize("kind, size", [("llama", {"head_dim": 2}), ("gpt2", {"hidden_size": 8})])
def test_llama3_tells_by_wavelength_and_takes_one_pair(kind, size):
    assert logits(patch_model(tiny(kind, **size), "llama3", factor=4.0)).isfinite().all()


@pytest.mark.parametrize("scheme", ["ntk", "dynamic_ntk", "yarn", "longrope"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_fast_and_slow_pairs_take_two(kind, scheme):
    """The one pair is the fastest, which ntk keeps: theta * alpha^(2/0) has no value."""
    model = tiny(kind, **({"head_dim": 2} if kind == "llama" else {"hidden_size": 8}))
    assert_refused(model, scheme, "two pairs", "2 channels", "linear", **options(scheme))


@pytest.mark.parametrize("kind", ["gpt2", "bert", "llama"])
def test_odd_hidden_size_has_no_sinusoids(kind):
    sizes = {"head_dim": 8, "num_key_value_heads": 3} if kind == "llama" else {}
    model = tiny(kind, hidden_size=27, num_attention_heads=3, **sizes)
    assert_refused(model, "sinusoidal", "27", "odd", "pairs")
    assert_refused(patch_model(model, "alibi"), "sinusoidal", "27", "odd")


def lora(**more: Any) -> peft.LoraConfig:
    return peft.LoraConfig(r=2, target_modules=["q_proj"], **more)


def test_a_peft_model_is_refused():
    base = tiny("llama")
    wrapped = peft.get_peft_model(base, lora())
    assert_refused(wrapped, "alibi", "PeftModel", "PEFT adapters", "first, then wrap")
    assert_refused(base, "yarn", "PEFT adapters", "first, then wrap", **FAR)


def test_a_model_with_an_added_adapter_is_refused():
    model = tiny("llama")
    model.add_adapter(lora())
    assert_refused(model, "alibi", "PEFT adapters", "first, then wrap")


def test_a_patched_model_with_adapters_is_neither_patched_anew_nor_unpatched():
    base = patch_model(tiny("llama"), "alibi")
    wrapped = peft.get_peft_model(base, lora())
    assert_refused(wrapped, "yarn", "PEFT adapters", **FAR)
    before = Snapshot.of(wrapped)
    with pytest.raises(UnsupportedModel, match="PEFT adapters"):
        unpatch_model(wrapped)
    before.assert_same(Snapshot.of(wrapped))


def test_a_compiled_model_is_refused():
    model = tiny("llama")
    compiled = torch.compile(model)
    before = Snapshot.of(model)
    with pytest.raises(UnsupportedModel, match=r"compiled model.*first, then torch\.compile"):
        patch_model(compiled, "alibi")
    before.assert_same(Snapshot.of(model))


class Wrapper(nn.Module):
    """What DistributedDataParallel and its like look like."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module


def test_a_wrapped_model_is_refused_with_the_way_to_the_inner_one():
    model = tiny("llama")
    before = Snapshot.of(model)
    with pytest.raises(UnsupportedModel, match=r"PreTrainedModel.*Wrapper.*model\.module before"):
        patch_model(Wrapper(model), "alibi")
    before.assert_same(Snapshot.of(model))


@pytest.mark.parametrize("thing", ["llama", None, 3, nn.Linear(2, 2), transformers.LlamaForCausalLM, {"a": 1}])
def test_what_is_no_model_is_refused(thing):
    for call in (lambda: patch_model(thing, "alibi"), lambda: unpatch_model(thing), lambda: check_model(thing)):
        with pytest.raises(UnsupportedModel, match=r"PreTrainedModel.*got"):
            call()


def test_a_model_on_the_meta_device_is_refused():
    with torch.device("meta"):
        model = tiny("llama")
    keys = list(model.state_dict())
    with pytest.raises(UnsupportedModel, match=r"meta device.*Load the weights first"):
        patch_model(model, "alibi")
    assert not is_patched(model)
    assert list(model.state_dict()) == keys
    assert "posenc" not in model.config.to_dict()


def test_an_unsupported_type_is_named_with_what_was_looked_for():
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=8)
    model = transformers.ViTMSNModel(transformers.ViTMSNConfig(patch_size=4, **sizes)).eval()
    supported = [t for f in FAMILIES.values() for t in f.model_types]
    assert_refused(model, "alibi", "'vit_msn'", "inv_freq", "rope_parameters", *supported, forward=False)


def test_a_type_that_cannot_be_patched_says_why():
    config = transformers.GPTJConfig(n_embd=16, n_layer=1, n_head=2, rotary_dim=4, vocab_size=VOCAB, n_positions=32)
    assert_refused(transformers.GPTJForCausalLM(config).eval(), "alibi", "'gptj'", "table of its own")


NESTED = {"full_attention": {"rope_type": "default", "rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e4}}


@pytest.mark.parametrize("rope", [None, {}, {"rope_type": "default"}, NESTED], ids=["None", "empty", "bare", "nested"])
@pytest.mark.parametrize("scheme", ["yarn", "alibi", "none"])
def test_rope_parameters_missing_or_nested(scheme, rope):
    model = tiny("llama")
    model.config.rope_parameters = copy.deepcopy(rope)
    assert_refused(model, scheme, "rope_parameters", "'llama'", "rope_theta", **options(scheme))


@pytest.mark.parametrize("rope", [None, {}, {"rope_type": "default"}, NESTED], ids=["None", "empty", "bare", "nested"])
def test_check_model_says_what_is_wrong_with_rope_parameters(rope):
    model = tiny("llama")
    model.config.rope_parameters = copy.deepcopy(rope)
    with pytest.raises(PosencError, match="rope_parameters"):
        check_model(model)


@pytest.mark.parametrize(
    "scheme, kind", [("alibi", "llama"), ("t5", "bert"), ("dynamic_ntk", "llama"), ("rope", "gpt2")]
)
@pytest.mark.parametrize("kernel", ["flex_attention", "flash_attention_2"])
def test_sealed_schemes_need_a_kernel_that_they_know(scheme, kind, kernel):
    model = tiny(kind)
    model.config._attn_implementation = kernel
    assert_refused(model, scheme, repr(kernel), "sdpa", "eager", "set_attn_implementation", forward=False)
    assert model.config._attn_implementation == kernel


@pytest.mark.parametrize(
    "scheme, kind", [("yarn", "llama"), ("none", "llama"), ("sinusoidal", "gpt2"), ("none", "bert")]
)
def test_other_schemes_take_any_kernel(scheme, kind):
    model = tiny(kind)
    model.config._attn_implementation = "flex_attention"
    patch_model(model, scheme, **options(scheme))
    assert model.config._attn_implementation == "flex_attention"
    unpatch_model(model)
    assert model.config._attn_implementation == "flex_attention"


@pytest.mark.parametrize("kind", KINDS)
def test_unpatching_an_unpatched_model(kind):
    model = tiny(kind)
    before = Snapshot.of(model)
    with pytest.raises(PosencError, match="not patched"):
        unpatch_model(model)
    before.assert_same(Snapshot.of(model))


def scaled_model(**rope: Any) -> transformers.PreTrainedModel:
    return tiny("llama", max_position_embeddings=128, rope_parameters={"rope_theta": 1e4, **rope})


def test_replacing_a_scaling_whose_original_length_is_unknown():
    model = scaled_model(rope_type="linear", factor=4.0)
    words = ["'linear'", "existing='replace'", "trained_length="]
    assert_refused(model, "yarn", *words, existing="replace", target_length=256)
    patch_model(model, "yarn", existing="replace", trained_length=32, target_length=256)
    assert model.config.rope_parameters["factor"] == 8.0
    assert_refused(model, "yarn", *words, existing="replace", target_length=256)
    assert model.config.rope_parameters["factor"] == 8.0


def test_theta_beside_a_scaling_that_is_extended():
    model = scaled_model(rope_type="linear", factor=4.0)
    words = ["rope_theta=5000", "'linear'", "existing='replace'"]
    assert_refused(model, "yarn", *words, existing="extend", target_length=256, rope_theta=5000.0)


def test_a_rope_type_that_cannot_be_extended():
    model = scaled_model(rope_type="dynamic", factor=4.0)
    assert_refused(model, "yarn", "'dynamic'", "existing='replace'", existing="extend", target_length=256)
    short, long = [1.0] * 4, [2.0] * 4
    model = scaled_model(
        rope_type="longrope", short_factor=short, long_factor=long, factor=4.0, original_max_position_embeddings=32
    )
    # Without a forward, which replaces buffers of transformers' own longrope each time.
    assert_refused(
        model, "yarn", "'longrope'", "existing='replace'", existing="extend", target_length=256, forward=False
    )


def test_lists_of_numbers_may_be_tuples_and_ints():
    """The other side of the refusals above."""
    patch_model(tiny("llama"), "longrope", long_factor=(1, 2, 3, 4), **FAR)
    patch_model(tiny("llama"), "longrope", long_factor=[1, 2.0, 3, 4], **FAR)
    patch_model(tiny("llama"), "yarn", factor=4)


# A fault in the middle.


# Anything as an option.


@pytest.mark.parametrize("path", ["runs/my-llama", Path("runs/my-llama")])
def test_a_path_in_the_place_of_a_model_is_told_how_to_load_it(path):
    with pytest.raises(UnsupportedModel, match=r"Load it first: hf_posenc.load\(path\)"):
        patch_model(path, "yarn", factor=4)
