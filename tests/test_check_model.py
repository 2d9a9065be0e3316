"""`check_model` finds healthy models healthy, and each fault that changes what a model does or what others load."""

import copy

import pytest
import torch
import transformers
from cells import CELLS, KINDS, LENGTH, ROTARY, options, tiny
from test_describe import PAIRS, THETA, patched_model
from torch import nn
from transformers import AttentionMaskInterface

from hf_posenc import PosencError, check_model, describe, patch_model, unpatch_model
from hf_posenc.core.tables import ZeroTable
from hf_posenc.runtime.hooks import before_embeddings, before_first_layer
from hf_posenc.runtime.positions import before_attention

# check_model: healthy models.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_unpatched_models_are_healthy_in_any_dtype(kind, dtype):
    check_model(tiny(kind).to(dtype))


@pytest.mark.parametrize("scheme, kind", CELLS)
def test_patched_models_are_healthy_also_when_cast_and_unpatched(scheme, kind):
    model = patched_model(kind, scheme)
    check_model(model)
    before = describe(model)
    model.to(torch.bfloat16)
    check_model(model)
    assert describe(model) == before
    check_model(model.float())
    check_model(unpatch_model(model))


@pytest.mark.parametrize("scheme, kind", CELLS)
def test_models_cast_before_the_patch_are_healthy(scheme, kind):
    model = patch_model(tiny(kind).to(torch.bfloat16), scheme, **options(scheme))
    check_model(model)
    assert describe(model).longest_wavelength == describe(patched_model(kind, scheme)).longest_wavelength


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_large_model_is_healthy_in_half_precision(dtype):
    """Heads and theta of Qwen2: the slowest frequency is 1.2e-6, where fp16 has few bits left."""
    model = tiny("qwen2", head_dim=128, hidden_size=512, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    check_model(model.to(dtype))


@pytest.mark.parametrize("rope_type", ["linear", "dynamic", "yarn", "llama3", "longrope"])
def test_models_with_a_scaling_of_their_own_are_healthy_also_after_use(rope_type):
    more = {
        "yarn": {"original_max_position_embeddings": 32},
        "llama3": {"original_max_position_embeddings": 32, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "longrope": {
            "original_max_position_embeddings": 32,
            "short_factor": [1.0] * PAIRS,
            "long_factor": [1.0, 2.0, 3.0, 4.0],
        },
    }
    rope = {"rope_type": rope_type, "rope_theta": THETA, "factor": 4.0, **more.get(rope_type, {})}
    model = tiny("llama", max_position_embeddings=128, rope_parameters=rope)
    check_model(model)
    model(torch.arange(3, 67)[None])
    check_model(model)


# check_model: faults. Each is one that changes what the model does, or what others will load.


def unhealthy(model: transformers.PreTrainedModel, *words: str) -> None:
    with pytest.raises(PosencError) as caught:
        check_model(model)
    message = str(caught.value)
    assert [w for w in words if w.lower() not in message.lower()] == [], message


@pytest.mark.parametrize("kind", ROTARY)
@pytest.mark.parametrize(
    "edit",
    [
        {"rope_theta": 500_000.0},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": LENGTH},
    ],
    ids=["theta", "linear", "yarn"],
)
def test_a_config_edited_after_construction(kind, edit):
    model = tiny(kind)
    model.config.rope_parameters = {**model.config.rope_parameters, **edit}
    unhealthy(model, "rope_parameters", "edited after construction", "patch_model")


def test_a_config_edited_after_the_patch():
    model = patched_model("llama", "yarn")
    model.config.rope_parameters["factor"] = 8.0
    unhealthy(model, "rope_parameters", "'yarn'")


@pytest.mark.parametrize("scheme", [None, "rope", "yarn", "none", "alibi", "dynamic_ntk", "sinusoidal"])
def test_tampered_frequencies_of_the_rotary_module(scheme):
    model = tiny("llama") if scheme is None else patched_model("llama", scheme)
    with torch.no_grad():
        model.base_model.rotary_emb.inv_freq[1] += 0.05
    unhealthy(model)


@pytest.mark.parametrize("scheme, kind", [("rope", "gpt2"), ("yarn", "bert"), ("dynamic_ntk", "llama")])
def test_tampered_frequencies_of_the_attention_functions(scheme, kind):
    model = patched_model(kind, scheme)
    with torch.no_grad():
        model.base_model.posenc.inv_freq[1] *= 1.05
    unhealthy(model, "live frequencies")


@pytest.mark.parametrize("scheme", [None, "rope"])
def test_a_tampered_frequency_that_is_very_slow(scheme):
    """1e-8 of absolute tolerance would be most of it."""
    model = tiny("llama", head_dim=128, rope_parameters={"rope_type": "default", "rope_theta": 1e8})
    model = model if scheme is None else patch_model(model, scheme)
    rotary = model.base_model.rotary_emb
    with torch.no_grad():
        rotary.inv_freq[-1] *= 1.3
        rotary.original_inv_freq[-1] *= 1.3
    unhealthy(model, "frequencies")


def test_a_tampered_attention_scale():
    model = tiny("llama")
    model.base_model.rotary_emb.attention_scaling = 1.1
    unhealthy(model, "attention scale")


def test_a_tampered_attention_scale_of_the_patch():
    model = patched_model("llama", "yarn")
    model.base_model.rotary_emb.inner.attention_scaling = 1.0
    unhealthy(model, "attention scale")


def test_the_rotary_module_of_the_patch_was_replaced():
    model = patched_model("llama", "yarn")
    model.base_model.rotary_emb = tiny("llama").base_model.rotary_emb
    unhealthy(model, "rotary module")


@pytest.mark.parametrize(
    "kind, scheme", [("llama", "alibi"), ("gpt2", "rope"), ("bert", "t5"), ("llama", "dynamic_ntk")]
)
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_attention_set_to_a_plain_kernel_on_a_sealed_model(kind, scheme, kernel):
    model = patched_model(kind, scheme)
    model.set_attn_implementation(kernel)
    unhealthy(model, repr(kernel), "hf_posenc_sdpa")
    model.set_attn_implementation("hf_posenc_" + kernel)
    check_model(model)


def remove_hook(module: nn.Module, hook: object) -> None:
    keys = [key for key, value in module._forward_pre_hooks.items() if value is hook]
    assert len(keys) == 1
    del module._forward_pre_hooks[keys[0]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_removed_hook_of_attention(kind):
    model = patched_model(kind, "alibi")
    hooked = [m for m in model.modules() if before_attention in m._forward_pre_hooks.values()]
    assert len(hooked) == 2
    remove_hook(hooked[1], before_attention)
    unhealthy(model, "1 of 2", "hook")


@pytest.mark.parametrize("scheme", ["sinusoidal", "learned"])
def test_a_removed_hook_of_the_first_layer(scheme):
    """Without it the table is there, and nothing adds it."""
    model = patched_model("llama", scheme)
    remove_hook(model.base_model.layers[0], before_first_layer)
    unhealthy(model, "hook")


@pytest.mark.parametrize("scheme", ["sinusoidal", "alibi"])
def test_a_removed_hook_of_the_embeddings(scheme):
    """Without it BERT ends where its buffers end."""
    model = patched_model("bert", scheme)
    remove_hook(model.base_model.embeddings, before_embeddings)
    unhealthy(model, "hook")


@pytest.mark.parametrize("scheme", ["none", "alibi", "sinusoidal", "learned", "rope"])
def test_a_table_replaced_by_a_plain_one(scheme):
    model = patched_model("gpt2", scheme)
    rows = model.config.max_position_embeddings
    model.base_model.wpe = nn.Embedding(rows, 32)
    unhealthy(model, "table", "Embedding")
    model = patched_model("bert", scheme)
    model.base_model.embeddings.position_embeddings = nn.Embedding(rows, 32)
    unhealthy(model, "table", "Embedding")


@pytest.mark.parametrize("scheme", ["sinusoidal", "learned"])
def test_a_table_replaced_by_zeros(scheme):
    model = patched_model("gpt2", scheme)
    model.base_model.wpe = ZeroTable(32, model.config.max_position_embeddings, model.base_model.wte.weight)
    unhealthy(model, "table")


def test_zeros_replaced_by_another_table():
    model, other = patched_model("gpt2", "alibi"), patched_model("gpt2", "sinusoidal")
    model.base_model.wpe = other.base_model.wpe
    unhealthy(model, "table")


def test_a_table_with_other_rows_than_the_config_promises():
    model, other = patched_model("gpt2", "learned"), patched_model("gpt2", "learned", target_length=64)
    model.base_model.wpe = other.base_model.wpe
    unhealthy(model, "64 rows", "128")


def test_tampered_sinusoids():
    model = patched_model("gpt2", "sinusoidal")
    with torch.no_grad():
        model.base_model.wpe.posenc_frequencies *= 1.5
    unhealthy(model, "table")


@pytest.mark.parametrize("kind", KINDS)
def test_changed_slopes(kind):
    model = patched_model(kind, "alibi")
    with torch.no_grad():
        model.base_model.posenc_bias.slopes[0] = 0.3
    unhealthy(model, "slopes")


@pytest.mark.parametrize("scheme", ["alibi", "t5"])
def test_a_lost_bias(scheme):
    model = patched_model("llama", scheme)
    del model.base_model.posenc_bias
    unhealthy(model, "bias", "missing")


def test_trained_parameters_are_no_fault():
    model = patched_model("llama", "t5")
    nn.init.ones_(model.base_model.posenc_bias.weight)
    check_model(model)
    model = patched_model("gpt2", "learned")
    nn.init.ones_(model.base_model.wpe.weight)
    check_model(model)


@pytest.mark.parametrize("scheme, kind", [cell for cell in CELLS if cell[1] in ("llama", "gpt2", "bert")])
def test_a_config_that_claims_a_patch_which_is_not_there(scheme, kind):
    model = tiny(kind)
    model.config.posenc = copy.deepcopy(patched_model(kind, scheme).config.posenc)
    unhealthy(model, repr(scheme), "no patch is in place", "load")


@pytest.mark.parametrize("kind, scheme, claimed", [("llama", "yarn", "ntk"), ("gpt2", "sinusoidal", "none")])
def test_a_config_that_claims_another_patch(kind, scheme, claimed):
    model = patched_model(kind, scheme)
    model.config.posenc = copy.deepcopy(patched_model(kind, claimed).config.posenc)
    unhealthy(model)


@pytest.mark.parametrize("scheme", ["yarn", "alibi", "sinusoidal"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_a_patch_that_the_config_does_not_tell_of(kind, scheme):
    model = patched_model(kind, scheme)
    del model.config.posenc
    unhealthy(model)


@pytest.mark.parametrize("record", ["yarn", {}, {"format": 99}, {"format": 1}, {"format": 1, "scheme": "yarm"}])
def test_a_record_that_cannot_be_read(record):
    model = tiny("llama")
    model.config.posenc = record
    unhealthy(model)
    with pytest.raises(PosencError):
        describe(model)


@pytest.mark.parametrize("kernel", ["hf_posenc_sdpa", "hf_posenc_eager"])
def test_a_mask_function_that_is_not_registered(kernel):
    model = patched_model("llama", "alibi")
    model.set_attn_implementation(kernel)
    check_model(model)
    registered = AttentionMaskInterface._global_mapping
    mask = registered.pop(kernel)
    try:
        unhealthy(model, "mask function", repr(kernel), "padding")
    finally:
        registered[kernel] = mask
    check_model(model)


def test_every_fault_is_told_at_once():
    model = patched_model("llama", "alibi")
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        model.base_model.posenc_bias.slopes[0] = 0.3
    unhealthy(model, "'sdpa'", "slopes")
