"""`describe` and `check_model` look at the live model: what they say is computed here anew, by hand."""

import math

import pytest
import torch
import transformers
from cells import CELLS, KINDS, LENGTH, ROTARY, TABLES, TEXT, effect, options, tiny

from hf_posenc import describe, patch_model, unpatch_model

DIM, PAIRS, THETA = 8, 4, 10_000.0


def close(value: float) -> object:
    return pytest.approx(value, rel=1e-5)


def patched_model(kind: str, scheme: str, **given) -> transformers.PreTrainedModel:
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


def native(does, kind: str) -> bool:
    """Whether a rotation is one that the model's own rotary module can do: fixed, and known to its config."""
    return kind in ROTARY and not does.rotation.follows_length and does.rotation.rope_parameters is not None


@pytest.mark.parametrize("scheme, kind", CELLS)
def test_patched_models(scheme, kind):
    model, does = patched_model(kind, scheme), effect(scheme, kind)
    told, text = describe(model), str(describe(model))
    inside = (
        does.bias is not None or does.pattern is not None or (does.rotation is not None and not native(does, kind))
    )
    sealed = inside or (does.table is not None and kind not in TABLES)
    grade = "sealed" if sealed else "config" if kind in ROTARY else "weights"
    assert told.scheme == scheme
    assert told.options.items() >= options(scheme).items()
    assert told.trained_length == LENGTH
    reach = options(scheme).get("target_length", LENGTH * options(scheme).get("factor", 1))
    assert told.target_length == reach == model.config.max_position_embeddings
    assert told.portability.startswith(grade + ":")
    assert told.kernel == ("hf_posenc_sdpa" if inside else "sdpa")
    assert (told.bias != "none") == (does.bias is not None)
    assert told.pairs == (sum(f > 0 for f in does.rotation.inv_freq) if does.rotation else 0)
    assert (told.rope_theta is not None) == (does.rotation is not None)
    for value in (scheme, grade, told.kernel, type(model).__name__):
        assert value in text


@pytest.mark.parametrize("scheme", TEXT)
def test_the_text_holds_the_numbers(scheme):
    told = describe(patched_model("llama", scheme))
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
    told = describe(patched_model(kind, "ntk", factor=factor))
    raised = THETA * factor ** (DIM / (DIM - 2))
    assert told.effective_theta == close(raised)
    assert told.shortest_wavelength == close(2 * math.pi)
    assert told.longest_wavelength == close(wavelength(PAIRS - 1, raised)) == close(factor * wavelength(PAIRS - 1))
    assert told.factor == factor
    assert told.pairs_below_one_turn == slow_pairs(raised, DIM, LENGTH)


def test_ntk_with_its_own_alpha():
    told = describe(patched_model("llama", "ntk", factor=4.0, alpha=8.0))
    assert told.effective_theta == close(THETA * 8 ** (DIM / (DIM - 2)))
    assert told.factor == 4.0


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("factor", [1.0, 2.0, 4.0, 32.0])
def test_yarn(kind, factor):
    told = describe(patched_model(kind, "yarn", factor=factor))
    assert told.attention_scaling == close(0.1 * math.log(factor) + 1)
    assert told.longest_wavelength == close(factor * wavelength(PAIRS - 1))
    assert told.rope_theta == THETA
    assert f"{0.1 * math.log(factor) + 1:.6g}" in str(told)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_linear(kind):
    told = describe(patched_model(kind, "linear", target_length=96))
    assert told.factor == close(3.0)
    assert told.shortest_wavelength == close(3 * 2 * math.pi)
    assert told.longest_wavelength == close(3 * wavelength(PAIRS - 1))
    assert told.pairs_below_one_turn == sum(3 * wavelength(i) > LENGTH for i in range(PAIRS))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_proportional_turns_the_fastest_pairs(kind):
    told = describe(patched_model(kind, "proportional", partial_rotary_factor=0.5))
    assert told.pairs == 2
    assert told.longest_wavelength == close(wavelength(1))
    assert told.effective_theta == close(THETA)


def test_dynamic_ntk_is_described_as_it_stands_within_the_trained_length():
    told = describe(patched_model("llama", "dynamic_ntk", target_length=128))
    assert told.effective_theta == close(THETA)
    assert told.factor == 4.0


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("scheme", ["rope", "dynamic_ntk", "yarn", "longrope", "proportional"])
def test_a_theta_of_ones_own(scheme, kind):
    told = describe(patched_model(kind, scheme, rope_theta=500.0, **options(scheme)))
    assert told.rope_theta == 500.0
    assert told.shortest_wavelength == close(2 * math.pi)
    if scheme in ("rope", "dynamic_ntk"):
        assert told.effective_theta == close(500.0)


def test_trained_length_is_what_the_user_said():
    told = describe(patched_model("llama", "yarn", trained_length=16, target_length=64))
    assert (told.trained_length, told.target_length, told.factor) == (16, 64, 4.0)


def test_the_table_and_the_bias_are_named():
    assert "LearnedTable(128" in describe(patched_model("gpt2", "learned")).table
    assert "SinusoidTable" in describe(patched_model("llama", "sinusoidal")).table
    assert "ZeroTable" in describe(patched_model("bert", "alibi")).table
    assert "LinearBias(heads=4, causal=True)" in describe(patched_model("gpt2", "alibi")).bias
    assert "LinearBias(heads=4, causal=False)" in describe(patched_model("bert", "alibi")).bias
    assert "buckets=32" in describe(patched_model("bert", "t5")).bias


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
    model = tiny(kind) if scheme is None else patched_model(kind, scheme)
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
