"""`describe` and `check_model` look at the live model: what they say is computed here anew, by hand."""

import copy
import math

import pytest
import torch
import transformers
from cells import CELLS, KINDS, LENGTH, PATTERNS, TEXT, options, tiny
from torch import nn
from transformers import AttentionMaskInterface

from hf_posenc import SCHEMES, PosencError, check_model, describe, patch_model, unpatch_model
from hf_posenc.core.tables import ZeroTable
from hf_posenc.runtime.hooks import before_embeddings, before_first_layer
from hf_posenc.runtime.positions import before_attention

ROTARY = ["llama", "mistral", "qwen2", "qwen3"]
TABLES = ["gpt2", "bert", "bert_decoder"]
DIM, PAIRS, THETA = 8, 4, 10_000.0
SEALED_ANYWHERE = ["alibi", "t5", "dynamic_ntk", "longrope", *PATTERNS]


def close(value: float) -> object:
    return pytest.approx(value, rel=1e-5)


def patched(kind: str, scheme: str, **given) -> transformers.PreTrainedModel:
    return patch_model(tiny(kind), scheme, **(given or options(scheme)))


def wavelength(pair: int, theta: float = THETA, dim: int = DIM) -> float:
    """Tokens that pair i takes for one turn."""
    return 2 * math.pi * theta ** (2 * pair / dim)


def slow_pairs(theta: float, dim: int, length: int) -> int:
    """Pairs that turn less than once within `length` tokens."""
    return sum(wavelength(i, theta, dim) > length for i in range(dim // 2))


@pytest.mark.parametrize("theta, head", [(10_000.0, 8), (500_000.0, 16), (100.0, 8), (1e6, 128)])
def test_wavelengths_of_an_unpatched_rope(theta, head):
    model = tiny("llama", head_dim=head, rope_parameters={"rope_type": "default", "rope_theta": theta})
    told = describe(model)
    assert told.shortest_wavelength == close(2 * math.pi)
    assert told.longest_wavelength == close(wavelength(head // 2 - 1, theta, head))
    assert told.pairs == head // 2
    assert told.pairs_below_one_turn == slow_pairs(theta, head, LENGTH) > 0
    assert told.rope_theta == theta
    assert told.effective_theta == pytest.approx(theta, rel=1e-4)
    assert told.attention_scaling == 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_unpatched_models(kind):
    model = tiny(kind)
    told = describe(model)
    assert told.model == f"{type(model).__name__} ({model.config.model_type})"
    assert "the model's own" in told.scheme
    assert told.options == {}
    assert (told.trained_length, told.target_length, told.factor) == (LENGTH, LENGTH, None)
    assert told.kernel == "sdpa"
    assert told.bias == "none"
    assert told.portability == "unpatched"
    assert told.pairs == (PAIRS if kind in ROTARY else 0)
    assert (told.table == "none") == (kind in ROTARY)
    assert (told.effective_theta is None) == (kind in TABLES)
    assert (told.longest_wavelength is None) == (kind in TABLES)


def test_an_unpatched_model_that_is_scaled():
    rope = {"rope_type": "linear", "rope_theta": THETA, "factor": 4.0}
    told = describe(tiny("llama", max_position_embeddings=128, rope_parameters=rope))
    assert told.scheme.startswith("linear RoPE")
    assert told.factor == 4.0
    assert told.shortest_wavelength == close(4 * 2 * math.pi)
    assert told.longest_wavelength == close(4 * wavelength(PAIRS - 1))


def test_an_unpatched_model_scaled_by_yarn():
    rope = {"rope_type": "yarn", "rope_theta": THETA, "factor": 4.0, "original_max_position_embeddings": LENGTH}
    told = describe(tiny("llama", max_position_embeddings=128, rope_parameters=rope))
    assert told.scheme.startswith("yarn RoPE")
    assert told.attention_scaling == close(0.1 * math.log(4) + 1)
    assert told.longest_wavelength == close(4 * wavelength(PAIRS - 1))


@pytest.mark.parametrize("scheme, kind", CELLS)
def test_patched_models(scheme, kind):
    model = patched(kind, scheme)
    told, text = describe(model), str(describe(model))
    sealed = scheme in SEALED_ANYWHERE or (scheme in ("learned", "sinusoidal", "fourier")) == (kind in ROTARY)
    if scheme == "none":
        sealed = False
    grade = "sealed" if sealed else "config" if kind in ROTARY else "weights"
    assert told.scheme == scheme
    assert told.options.items() >= options(scheme).items()
    assert told.trained_length == LENGTH
    reach = 4 * LENGTH if {"factor", "target_length"} & set(options(scheme)) else LENGTH
    assert told.target_length == reach == model.config.max_position_embeddings
    assert told.portability.startswith(grade + ":")
    inside = sealed and scheme not in ("sinusoidal", "fourier", "learned")  # those add to the input only
    assert told.kernel == ("hf_posenc_sdpa" if inside else "sdpa")
    assert (told.bias != "none") == (scheme in ("alibi", "t5"))
    turns = scheme in SCHEMES and scheme not in ("none", "alibi", "t5", "sinusoidal", "fourier", "learned")
    assert told.pairs == ((3 if scheme == "proportional" else PAIRS) if turns else 0)
    assert (told.rope_theta is not None) == turns
    for value in (scheme, grade, told.kernel, type(model).__name__):
        assert value in text


@pytest.mark.parametrize("scheme", TEXT)
def test_the_text_holds_the_numbers(scheme):
    told = describe(patched("llama", scheme))
    lines = labelled(str(told))
    for name in ("rope_theta", "effective_theta", "shortest_wavelength", "longest_wavelength", "attention_scaling"):
        value, label = getattr(told, name), name.replace("_", " ")
        assert (label in lines) == (value is not None)
        if value is not None:
            assert lines[label] == f"{value:.6g}"
    for name in ("trained_length", "target_length", "pairs", "pairs_below_one_turn", "kernel"):
        assert lines[name.replace("_", " ")] == str(getattr(told, name))


def labelled(text: str) -> dict[str, str]:
    """What each line of a printed description says, by its label; labels are padded to a column."""
    return {line[:22].strip(): line[22:] for line in text.splitlines()}


@pytest.mark.parametrize("factor", [2.0, 4.0, 16.0])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "bert"])
def test_ntk_raises_theta(kind, factor):
    told = describe(patched(kind, "ntk", factor=factor))
    raised = THETA * factor ** (DIM / (DIM - 2))
    assert told.effective_theta == close(raised)
    assert told.shortest_wavelength == close(2 * math.pi)
    assert told.longest_wavelength == close(wavelength(PAIRS - 1, raised)) == close(factor * wavelength(PAIRS - 1))
    assert told.factor == factor
    assert told.pairs_below_one_turn == slow_pairs(raised, DIM, LENGTH)


def test_ntk_with_its_own_alpha():
    told = describe(patched("llama", "ntk", factor=4.0, alpha=8.0))
    assert told.effective_theta == close(THETA * 8 ** (DIM / (DIM - 2)))
    assert told.factor == 4.0


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("factor", [1.0, 2.0, 4.0, 32.0])
def test_yarn(kind, factor):
    told = describe(patched(kind, "yarn", factor=factor))
    assert told.attention_scaling == close(0.1 * math.log(factor) + 1)
    assert told.longest_wavelength == close(factor * wavelength(PAIRS - 1))
    assert told.rope_theta == THETA
    assert f"{0.1 * math.log(factor) + 1:.6g}" in str(told)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_linear(kind):
    told = describe(patched(kind, "linear", target_length=96))
    assert told.factor == close(3.0)
    assert told.shortest_wavelength == close(3 * 2 * math.pi)
    assert told.longest_wavelength == close(3 * wavelength(PAIRS - 1))
    assert told.pairs_below_one_turn == sum(3 * wavelength(i) > LENGTH for i in range(PAIRS))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_proportional_turns_the_fastest_pairs(kind):
    told = describe(patched(kind, "proportional", partial_rotary_factor=0.5))
    assert told.pairs == 2
    assert told.longest_wavelength == close(wavelength(1))
    assert told.effective_theta == close(THETA)


def test_dynamic_ntk_is_described_as_it_stands_within_the_trained_length():
    told = describe(patched("llama", "dynamic_ntk", target_length=128))
    assert told.effective_theta == close(THETA)
    assert told.factor == 4.0


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("scheme", ["rope", "dynamic_ntk", "yarn", "longrope", "proportional"])
def test_a_theta_of_ones_own(scheme, kind):
    told = describe(patched(kind, scheme, rope_theta=500.0, **options(scheme)))
    assert told.rope_theta == 500.0
    assert told.shortest_wavelength == close(2 * math.pi)
    if scheme in ("rope", "dynamic_ntk"):
        assert told.effective_theta == close(500.0)


def test_trained_length_is_what_the_user_said():
    told = describe(patched("llama", "yarn", trained_length=16, target_length=64))
    assert (told.trained_length, told.target_length, told.factor) == (16, 64, 4.0)


def test_the_table_and_the_bias_are_named():
    assert "LearnedTable(128" in describe(patched("gpt2", "learned")).table
    assert "SinusoidTable" in describe(patched("llama", "sinusoidal")).table
    assert "ZeroTable" in describe(patched("bert", "alibi")).table
    assert "LinearBias(heads=4, causal=True)" in describe(patched("gpt2", "alibi")).bias
    assert "LinearBias(heads=4, causal=False)" in describe(patched("bert", "alibi")).bias
    assert "buckets=32" in describe(patched("bert", "t5")).bias


@pytest.mark.parametrize("kind", KINDS)
def test_unpatched_is_described_as_if_nothing_had_been(kind):
    model = tiny(kind)
    before = describe(model)
    for scheme in ("yarn", "alibi", "learned"):
        patch_model(model, scheme, **options(scheme))
        assert describe(model) != before
    assert describe(unpatch_model(model)) == before


# The live module, not the config.


@pytest.mark.parametrize(
    "scheme, kind", [(None, "llama"), ("yarn", "llama"), ("yarn", "gpt2"), ("dynamic_ntk", "llama")]
)
def test_describe_reads_the_live_frequencies(scheme, kind):
    model = tiny(kind) if scheme is None else patched(kind, scheme)
    before = describe(model)
    with torch.no_grad():
        live_frequencies(model)[-1] /= 2
    after = describe(model)
    assert after.longest_wavelength == close(2 * before.longest_wavelength)
    assert after.shortest_wavelength == before.shortest_wavelength
    assert after.effective_theta > before.effective_theta


def live_frequencies(model: transformers.PreTrainedModel) -> torch.Tensor:
    shared = getattr(model.base_model, "posenc", None)
    return (shared if shared is not None else model.base_model.rotary_emb).inv_freq


def test_describe_ignores_a_config_that_was_edited_too_late():
    model = tiny("llama")
    model.config.rope_parameters["rope_theta"] = 7.0
    assert describe(model).effective_theta == close(THETA)


# check_model: healthy models.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_unpatched_models_are_healthy_in_any_dtype(kind, dtype):
    check_model(tiny(kind).to(dtype))


@pytest.mark.parametrize("scheme, kind", CELLS)
def test_patched_models_are_healthy_also_when_cast_and_unpatched(scheme, kind):
    model = patched(kind, scheme)
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
    assert describe(model).longest_wavelength == describe(patched(kind, scheme)).longest_wavelength


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
    model = patched("llama", "yarn")
    model.config.rope_parameters["factor"] = 8.0
    unhealthy(model, "rope_parameters", "'yarn'")


@pytest.mark.parametrize("scheme", [None, "rope", "yarn", "none", "alibi", "dynamic_ntk", "sinusoidal"])
def test_tampered_frequencies_of_the_rotary_module(scheme):
    model = tiny("llama") if scheme is None else patched("llama", scheme)
    with torch.no_grad():
        model.base_model.rotary_emb.inv_freq[1] += 0.05
    unhealthy(model)


@pytest.mark.parametrize("scheme, kind", [("rope", "gpt2"), ("yarn", "bert"), ("dynamic_ntk", "llama")])
def test_tampered_frequencies_of_the_attention_functions(scheme, kind):
    model = patched(kind, scheme)
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
    model = patched("llama", "yarn")
    model.base_model.rotary_emb.inner.attention_scaling = 1.0
    unhealthy(model, "attention scale")


def test_the_rotary_module_of_the_patch_was_replaced():
    model = patched("llama", "yarn")
    model.base_model.rotary_emb = tiny("llama").base_model.rotary_emb
    unhealthy(model, "rotary module")


@pytest.mark.parametrize(
    "kind, scheme", [("llama", "alibi"), ("gpt2", "rope"), ("bert", "t5"), ("llama", "dynamic_ntk")]
)
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_attention_set_to_a_plain_kernel_on_a_sealed_model(kind, scheme, kernel):
    model = patched(kind, scheme)
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
    model = patched(kind, "alibi")
    hooked = [m for m in model.modules() if before_attention in m._forward_pre_hooks.values()]
    assert len(hooked) == 2
    remove_hook(hooked[1], before_attention)
    unhealthy(model, "1 of 2", "hook")


@pytest.mark.parametrize("scheme", ["sinusoidal", "learned"])
def test_a_removed_hook_of_the_first_layer(scheme):
    """Without it the table is there, and nothing adds it."""
    model = patched("llama", scheme)
    remove_hook(model.base_model.layers[0], before_first_layer)
    unhealthy(model, "hook")


@pytest.mark.parametrize("scheme", ["sinusoidal", "alibi"])
def test_a_removed_hook_of_the_embeddings(scheme):
    """Without it BERT ends where its buffers end."""
    model = patched("bert", scheme)
    remove_hook(model.base_model.embeddings, before_embeddings)
    unhealthy(model, "hook")


@pytest.mark.parametrize("scheme", ["none", "alibi", "sinusoidal", "learned", "rope"])
def test_a_table_replaced_by_a_plain_one(scheme):
    model = patched("gpt2", scheme)
    rows = model.config.max_position_embeddings
    model.base_model.wpe = nn.Embedding(rows, 32)
    unhealthy(model, "table", "Embedding")
    model = patched("bert", scheme)
    model.base_model.embeddings.position_embeddings = nn.Embedding(rows, 32)
    unhealthy(model, "table", "Embedding")


@pytest.mark.parametrize("scheme", ["sinusoidal", "learned"])
def test_a_table_replaced_by_zeros(scheme):
    model = patched("gpt2", scheme)
    model.base_model.wpe = ZeroTable(32, model.config.max_position_embeddings, model.base_model.wte.weight)
    unhealthy(model, "table")


def test_zeros_replaced_by_another_table():
    model, other = patched("gpt2", "alibi"), patched("gpt2", "sinusoidal")
    model.base_model.wpe = other.base_model.wpe
    unhealthy(model, "table")


def test_a_table_with_other_rows_than_the_config_promises():
    model, other = patched("gpt2", "learned"), patched("gpt2", "learned", target_length=64)
    model.base_model.wpe = other.base_model.wpe
    unhealthy(model, "64 rows", "128")


def test_tampered_sinusoids():
    model = patched("gpt2", "sinusoidal")
    with torch.no_grad():
        model.base_model.wpe.inv_freq *= 1.5
    unhealthy(model, "table")


@pytest.mark.parametrize("kind", KINDS)
def test_changed_slopes(kind):
    model = patched(kind, "alibi")
    with torch.no_grad():
        model.base_model.posenc_bias.slopes[0] = 0.3
    unhealthy(model, "slopes")


@pytest.mark.parametrize("scheme", ["alibi", "t5"])
def test_a_lost_bias(scheme):
    model = patched("llama", scheme)
    del model.base_model.posenc_bias
    unhealthy(model, "bias", "missing")


def test_trained_parameters_are_no_fault():
    model = patched("llama", "t5")
    nn.init.ones_(model.base_model.posenc_bias.weight)
    check_model(model)
    model = patched("gpt2", "learned")
    nn.init.ones_(model.base_model.wpe.weight)
    check_model(model)


@pytest.mark.parametrize("scheme, kind", [cell for cell in CELLS if cell[1] in ("llama", "gpt2", "bert")])
def test_a_config_that_claims_a_patch_which_is_not_there(scheme, kind):
    model = tiny(kind)
    model.config.posenc = copy.deepcopy(patched(kind, scheme).config.posenc)
    unhealthy(model, repr(scheme), "no patch is in place", "load")


@pytest.mark.parametrize("kind, scheme, claimed", [("llama", "yarn", "ntk"), ("gpt2", "sinusoidal", "none")])
def test_a_config_that_claims_another_patch(kind, scheme, claimed):
    model = patched(kind, scheme)
    model.config.posenc = copy.deepcopy(patched(kind, claimed).config.posenc)
    unhealthy(model)


@pytest.mark.parametrize("scheme", ["yarn", "alibi", "sinusoidal"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_a_patch_that_the_config_does_not_tell_of(kind, scheme):
    model = patched(kind, scheme)
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
    model = patched("llama", "alibi")
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
    model = patched("llama", "alibi")
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        model.base_model.posenc_bias.slopes[0] = 0.3
    unhealthy(model, "'sdpa'", "slopes")
