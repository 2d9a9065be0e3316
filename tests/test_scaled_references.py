"""Stretching that goes with the length, and models whose RoPE is scaled already, against transformers and by hand."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cells import LENGTH, tiny, tokens
from references import BETAS, at_length, logits, transformers_rope
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hf_posenc import patch_model

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


def decoded_logits(model: PreTrainedModel, ids: Tensor, prompt: int) -> Tensor:
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
    record_property("transformers_error", float((decoded_logits(theirs, ids, LENGTH - 4) - full).abs().max()))
    ours = patch_model(tiny("llama"), scheme=scheme, **options)
    full = logits(ours, ids)[:, LENGTH - 4 :]
    torch.testing.assert_close(decoded_logits(ours, ids, LENGTH - 4), full, atol=1e-4, rtol=1e-4)


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


def extend(scheme: str) -> tuple[dict, np.ndarray, float]:
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
    options, wanted, scale = extend(scheme)
    model = patch_model(scaled_llama(), scheme=scheme, factor=4.0, existing="extend", **options)
    found = model.model.rotary_emb.inv_freq.double().numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert model.model.rotary_emb.attention_scaling == pytest.approx(scale, rel=1e-6)
    assert model.config.max_position_embeddings == 512


@pytest.mark.parametrize("scheme", ["linear", "ntk", "llama3", "yarn"])
def test_extension_of_a_scaled_model_loads_as_longrope(scheme):
    model = patch_model(scaled_llama(), scheme=scheme, factor=4.0, existing="extend", **extend(scheme)[0])
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
