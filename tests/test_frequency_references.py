"""Frequencies against transformers' own, whatever the head, the length and the options."""

import pytest
import torch
from cells import tiny, tokens
from references import ROTATIONS, at_length, geometry, logits, transformers_rope
from torch import Tensor

from hf_posenc import SCHEMES, patch_model
from hf_posenc.core.effects import Geometry, Rotation

# ---------------------------------------------------------------- frequencies


def rotation(scheme: str, shape: Geometry, **options) -> Rotation:
    found = SCHEMES[scheme](**options).effect(shape).rotation
    assert found is not None
    return found


def same_rotation(ours: Rotation, theirs: tuple[Tensor, float]) -> None:
    torch.testing.assert_close(torch.tensor(ours.inv_freq), theirs[0], rtol=1e-5, atol=0)
    assert ours.attention_scaling == pytest.approx(theirs[1], rel=1e-6)


SHAPES = [(64, 512, 10_000.0), (128, 4096, 10_000.0), (128, 8192, 500_000.0), (80, 2048, 1_000_000.0), (8, 32, 500.0)]


@pytest.mark.parametrize("dim, trained, theta", SHAPES)
@pytest.mark.parametrize("factor", [1.0, 2.0, 4.0, 6.7, 32.0])
def test_frequencies_are_transformers(dim, trained, theta, factor):
    shape = geometry(dim, trained, theta)

    def theirs(**rope):
        return transformers_rope(dim, trained, round(trained * factor), theta=theta, **rope)

    for scheme in ("linear", "yarn", "llama3"):
        bands = dict(low_freq_factor=1.0, high_freq_factor=4.0) if scheme == "llama3" else {}
        ours = rotation(scheme, shape, factor=factor, **bands)
        same_rotation(ours, theirs(rope_type=scheme, factor=factor, **bands))
    larger = theta * factor ** (dim / (dim - 2))
    same_rotation(rotation("ntk", shape, factor=factor), theirs(rope_type="default", rope_theta=larger))
    larger = theta * 3.5 ** (dim / (dim - 2))
    ours = rotation("ntk", shape, factor=factor, alpha=3.5)
    same_rotation(ours, theirs(rope_type="default", rope_theta=larger))


@pytest.mark.parametrize("dim, trained, theta", SHAPES)
@pytest.mark.parametrize(
    "options",
    [
        dict(beta_fast=16.0, beta_slow=2.0),
        dict(truncate=False),
        dict(truncate=False, beta_fast=8.0, beta_slow=0.25),
        dict(beta_fast=2.0, beta_slow=1.9),
        dict(mscale=1.0, mscale_all_dim=0.707),
        dict(mscale=0.707, mscale_all_dim=1.0),
        dict(attention_factor=1.5),
        dict(rope_theta=123_456.0),
    ],
    ids=str,
)
def test_yarn_options_are_transformers(dim, trained, theta, options):
    ours = rotation("yarn", geometry(dim, trained, theta), factor=8.0, **options)
    theirs = transformers_rope(dim, trained, 8 * trained, **{"theta": theta, **options}, rope_type="yarn", factor=8.0)
    same_rotation(ours, theirs)


@pytest.mark.parametrize("low, high", [(1.0, 4.0), (0.5, 2.0), (2.0, 32.0)])
@pytest.mark.parametrize("dim, trained, theta", SHAPES)
def test_llama3_bands_are_transformers(low, high, dim, trained, theta):
    bands = dict(low_freq_factor=low, high_freq_factor=high)
    ours = rotation("llama3", geometry(dim, trained, theta), factor=8.0, **bands)
    theirs = transformers_rope(dim, trained, 8 * trained, theta=theta, rope_type="llama3", factor=8.0, **bands)
    same_rotation(ours, theirs)


@pytest.mark.parametrize("portion", [0.0, 0.1, 0.25, 0.3, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("factor", [1.0, 4.0])
@pytest.mark.parametrize("dim", [8, 64, 80])
def test_proportional_is_transformers(portion, factor, dim):
    ours = rotation("proportional", geometry(dim, 512), partial_rotary_factor=portion, factor=factor)
    keys = dict(rope_type="proportional", partial_rotary_factor=portion, factor=factor)
    same_rotation(ours, transformers_rope(dim, 512, **keys))


@pytest.mark.parametrize("attention_factor", [None, 1.25])
@pytest.mark.parametrize("factor", [1.0, 4.0, 32.0])
def test_longrope_is_transformers(attention_factor, factor):
    dim, trained = 32, 128
    short = tuple(1 + 0.01 * i for i in range(16))
    long = tuple(1 + 0.9 * i for i in range(16))
    options = dict(short_factor=short, long_factor=long, factor=factor)
    if attention_factor:
        options["attention_factor"] = attention_factor
    ours = rotation("longrope", geometry(dim, trained), **options)
    for length in (1, trained - 1, trained, trained + 1, 10 * trained):
        inv_freq, scale = transformers_rope(
            dim, trained, round(factor * trained), seq_len=length, rope_type="longrope", **options
        )
        torch.testing.assert_close(at_length(ours, length), inv_freq, rtol=1e-5, atol=0)
        assert ours.attention_scaling == pytest.approx(scale, rel=1e-6)


@pytest.mark.parametrize("dim, trained, theta", SHAPES)
@pytest.mark.parametrize("factor", [1.0, 2.0, 8.0])
def test_dynamic_ntk_is_transformers_at_every_length(dim, trained, theta, factor):
    ours = rotation("dynamic_ntk", geometry(dim, trained, theta), factor=factor, step=1)
    for length in (1, trained, trained + 1, trained + 7, 2 * trained, 3 * trained + 1, 16 * trained):
        inv_freq, scale = transformers_rope(
            dim, trained, seq_len=length, theta=theta, rope_type="dynamic", factor=factor
        )
        torch.testing.assert_close(at_length(ours, length), inv_freq, rtol=1e-5, atol=0)
        assert ours.attention_scaling == scale == 1.0


CONFIG_GRADE = {**ROTATIONS, "none": ({}, None)}


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("scheme", CONFIG_GRADE)
def test_a_fresh_model_from_the_patched_config_has_the_same_frequencies(kind, scheme):
    model = patch_model(tiny(kind), scheme=scheme, **CONFIG_GRADE[scheme][0])
    fresh = type(model)(type(model.config)(**model.config.to_dict())).eval()
    assert torch.equal(model.model.rotary_emb.inv_freq, fresh.model.rotary_emb.inv_freq)
    assert model.model.rotary_emb.attention_scaling == fresh.model.rotary_emb.attention_scaling
    fresh.load_state_dict(model.state_dict())
    ids = tokens(2, 50)
    assert torch.equal(logits(model, ids), logits(fresh, ids))
