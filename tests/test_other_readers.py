"""Keys of config.json for those who do not read `rope_parameters` as transformers does."""

import json
import math

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_posenc import PosencError, load, patch_model, save, unpatch_model
from hf_posenc.patching.other_readers import SEE

SHAPE = dict(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    initializer_range=0.3,
    pad_token_id=0,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=2.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
IDS = torch.randint(3, 64, (1, 100), generator=torch.Generator().manual_seed(0))
FOUR = dict(factor=4.0)
NUMBER, TEXT, CONVERTED, STOPPED = "a number", "no number", "converted", "stopped"
CELLS = {
    ("llama", "ntk"): (FOUR, NUMBER, None, CONVERTED),
    ("llama", "linear"): (FOUR, NUMBER, "linear", CONVERTED),
    ("llama", "yarn"): (FOUR, NUMBER, "yarn", CONVERTED),
    ("llama", "yarn", "attention_factor"): ({**FOUR, "attention_factor": 1.5}, NUMBER, "yarn", STOPPED),
    ("llama", "yarn", "truncate"): ({**FOUR, "truncate": False}, TEXT, None, STOPPED),
    ("llama", "llama3"): (FOUR, NUMBER, "llama3", CONVERTED),
    ("llama", "none"): ({}, NUMBER, "linear", CONVERTED),
    ("llama", "proportional"): ({}, NUMBER, "proportional", STOPPED),
    ("llama31", "ntk"): (FOUR, TEXT, None, STOPPED),
    ("qwen2", "llama3"): (FOUR, NUMBER, "llama3", STOPPED),
    ("gemma2", "ntk"): (FOUR, NUMBER, None, STOPPED),
    ("gemma2", "yarn"): (FOUR, TEXT, None, STOPPED),
}
"""What a runtime of the older keys is told of theta and of the scaling, and what llama.cpp's converter will do."""


def model_of(kind):
    torch.manual_seed(0)
    sizes = dict(SHAPE, rope_parameters=dict(LLAMA3)) if kind == "llama31" else SHAPE
    sizes = dict(sizes, head_dim=16) if kind == "gemma2" else sizes
    config = AutoConfig.for_model("llama" if kind == "llama31" else kind, **sizes)
    return AutoModelForCausalLM.from_config(config).eval()


def raw(folder):
    return json.loads((folder / "config.json").read_text())


@torch.no_grad()
def logits(model):
    return model(IDS).logits


@pytest.mark.parametrize("cell", CELLS, ids="-".join)
def test_each_is_told_what_it_needs_or_stopped(cell, tmp_path):
    options, theta, scaling, converter = CELLS[cell]
    model = patch_model(model_of(cell[0]), cell[1], **options)
    save(model, tmp_path)
    config = raw(tmp_path)
    assert isinstance(config["rope_theta"], float) == (theta == NUMBER)
    assert config.get("rope_scaling", {}).get("rope_type") == scaling
    assert ("n_layers" in config) == (converter == STOPPED)
    if scaling is not None:
        assert config["rope_scaling"] == config["rope_parameters"]
    expected = logits(model)
    assert torch.equal(logits(load(tmp_path)), expected)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), expected)


def test_an_attention_factor_of_its_own_is_said_in_mscale_too():
    """As mlx-lm computes it: 1 + 0.1 * mscale * ln(factor)."""
    for given in (1.5, 0.8):
        model = patch_model(model_of("llama"), "yarn", factor=4.0, attention_factor=given)
        rope = model.config.rope_parameters
        assert 1 + 0.1 * rope["mscale"] * math.log(4.0) == pytest.approx(given)
        assert rope["mscale_all_dim"] == 0.0 and rope["attention_factor"] == given


def test_a_composed_rope_says_its_attention_factor_where_vllm_reads_it():
    model = patch_model(model_of("llama31"), "yarn", factor=4.0)
    rope = model.config.rope_parameters
    assert rope["short_mscale"] == rope["long_mscale"] == rope["attention_factor"] != 1.0


@pytest.mark.parametrize("kind", ["qwen2", "llama31"])
def test_who_reads_theta_alone_is_stopped_before_what_is_sealed(kind, tmp_path):
    """text-embeddings-inference takes theta out of a Qwen2's config, and looks at no more of it."""
    model = patch_model(model_of(kind), "alibi", target_length=100)
    save(model, tmp_path)
    assert raw(tmp_path)["rope_theta"] == SEE
    assert torch.equal(logits(load(tmp_path)), logits(model))


@pytest.mark.parametrize("how", [("yarn", {"factor": 4.0, "attention_factor": 1.5}), ("alibi", {})])
def test_unpatching_takes_the_keys_away(how):
    model = model_of("llama")
    before = dict(vars(model.config))
    unpatch_model(patch_model(model, how[0], **how[1]))
    assert vars(model.config) == before


def test_keys_that_contradict_are_refused(tmp_path):
    save(patch_model(model_of("llama"), "yarn", factor=4.0), tmp_path)
    whole = raw(tmp_path)
    for change in ({"rope_theta": 5.0}, {"rope_scaling": {**whole["rope_scaling"], "factor": 2.0}}):
        (tmp_path / "config.json").write_text(json.dumps({**whole, **change}))
        with pytest.raises(PosencError, match="contradicts itself"):
            load(tmp_path)


def test_what_transformers_writes_anew_still_loads(tmp_path):
    """It reads the older keys, and drops them."""
    model = patch_model(model_of("llama"), "yarn", factor=4.0)
    save(model, tmp_path / "a")
    AutoModelForCausalLM.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
    assert not {"rope_theta", "rope_scaling"} & set(raw(tmp_path / "b"))
    assert torch.equal(logits(load(tmp_path / "b")), logits(model))
