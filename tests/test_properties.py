"""What must hold for any numbers, drawn by hypothesis."""

from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from cells import LENGTH, TEXT, effect, exists, options, tiny, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from references import geometry
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_posenc import SCHEMES, patch_model
from hf_posenc.core.effects import FollowingRotation, Geometry, Rotation
from hf_posenc.runtime.positions import Positions
from hf_posenc.runtime.rotation import rotate
from hf_posenc.schemes.frequencies import default_frequencies
from hf_posenc.schemes.sinusoidal import LAYOUTS, sinusoids

some = settings(max_examples=8, deadline=None, derandomize=True)
many = settings(max_examples=25, deadline=None, derandomize=True)

FIXED = ["rope", "linear", "ntk", "yarn", "llama3", "proportional"]
"""Rotations that do not follow the length."""
ROTARY = [*FIXED, "longrope", "dynamic_ntk"]


def rotation(scheme: str, shape: Geometry, **given_options) -> Rotation:
    found = SCHEMES[scheme](**given_options).effect(shape).rotation
    assert found is not None
    return found


def logits(model: PreTrainedModel, ids: Tensor, **kwargs) -> Tensor:
    with torch.no_grad():
        return model(ids, **kwargs).logits


@cache
def patched_model(scheme: str, kind: str, layers: int = 1) -> PreTrainedModel:
    return patch_model(tiny(kind, num_hidden_layers=layers), scheme=scheme, **options(scheme))


dims = st.sampled_from([4, 8, 16, 64, 80, 128])
lengths = st.integers(16, 10_000)
thetas = st.floats(100.0, 1e7)


# ---------------------------------------------------------------- distance only


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert", "bert_decoder"])
@pytest.mark.parametrize("scheme", [*FIXED, "alibi", "t5"])
@some
@given(shift=st.integers(1, 300), length=st.integers(2, 40), seed=st.integers(0, 99))
def test_only_distances_matter(scheme, kind, shift, length, seed):
    ids, at = tokens(1, length, seed), torch.arange(length)[None]
    model = patched_model(scheme, kind)
    here, there = (logits(model, ids, position_ids=p) for p in (at, at + shift))
    torch.testing.assert_close(here, there, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("scheme", ["sinusoidal", "learned"])
def test_tables_do_know_where_they_are(scheme, kind):
    ids, at = tokens(1, 20), torch.arange(20)[None]
    model = patched_model(scheme, kind)
    here, there = (logits(model, ids, position_ids=p) for p in (at, at + 7))
    assert (here - there).abs().max() > 0.1


@pytest.mark.parametrize("scheme", [*FIXED, "alibi", "t5"])
def test_distances_do_matter(scheme):
    """The test above would pass if positions did nothing at all."""
    ids, at = tokens(1, 20), torch.arange(20)[None]
    model = patched_model(scheme, "gpt2")
    near, far = (logits(model, ids, position_ids=p, use_cache=False) for p in (at, 5 * at))
    assert (near - far).abs().max() > 1e-2


# ---------------------------------------------------------------- rotations


@pytest.mark.parametrize("scheme", ROTARY)
@many
@given(dim=dims, trained=lengths, theta=thetas, position=st.integers(0, 131_071), seed=st.integers(0, 99))
def test_rotation_preserves_norms(scheme, dim, trained, theta, position, seed):
    turning = rotation(scheme, geometry(dim, trained, theta), **options(scheme))
    shared, at = Positions(turning, torch.device("cpu")), torch.tensor([[position]])
    stage = torch.tensor([3]) if turning.follows_length else None
    x = torch.randn(1, 2, 1, dim, generator=torch.Generator().manual_seed(seed))
    turned = rotate(x, shared.angles(at, stage))
    torch.testing.assert_close(turned.norm(dim=-1), turning.attention_scaling * x.norm(dim=-1), rtol=1e-5, atol=1e-6)
    assert turning.attention_scaling >= 1


@pytest.mark.parametrize("scheme", ROTARY)
@many
@given(dim=dims, trained=lengths, theta=thetas)
def test_low_index_is_fast(scheme, dim, trained, theta):
    inv_freq = rotation(scheme, geometry(dim, trained, theta), **options(scheme)).inv_freq
    assert len(inv_freq) == dim // 2
    assert all(a >= b for a, b in pairwise(inv_freq))
    assert inv_freq[0] > inv_freq[-1]


@pytest.mark.parametrize("scheme", ["linear", "ntk", "yarn", "llama3"])
@many
@given(dim=dims, trained=lengths, theta=thetas, factor=st.floats(1.0, 64.0))
def test_frequencies_lie_between_kept_and_slowed(scheme, dim, trained, theta, factor):
    shape = geometry(dim, trained, theta)
    plain = default_frequencies(dim, theta)
    for new, old in zip(rotation(scheme, shape, factor=factor).inv_freq, plain, strict=True):
        assert old / factor * (1 - 1e-9) <= new <= old * (1 + 1e-9)


@pytest.mark.parametrize("scheme", ["linear", "yarn", "llama3"])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    dim=dims,
    trained=lengths,
    theta=thetas,
    factor=st.floats(1.0, 64.0),
    low=st.floats(0.25, 4.0),
    ratio=st.floats(1.1, 40.0),
    truncate=st.booleans(),
)
def test_frequencies_are_transformers_for_any_numbers(scheme, dim, trained, theta, factor, low, ratio, truncate):
    chosen = {
        "linear": {},
        "yarn": dict(beta_slow=low, beta_fast=low * ratio, truncate=truncate),
        "llama3": dict(low_freq_factor=low, high_freq_factor=low * ratio),
    }[scheme]
    rope = dict(rope_type=scheme, rope_theta=theta, factor=factor, **chosen)
    if scheme != "linear":
        rope["original_max_position_embeddings"] = trained
    config = LlamaConfig(
        hidden_size=4 * dim,
        num_attention_heads=4,
        head_dim=dim,
        max_position_embeddings=round(trained * factor),
        rope_parameters=rope,
    )
    inv_freq, scale = ROPE_INIT_FUNCTIONS[scheme](config)
    ours = rotation(scheme, geometry(dim, trained, theta), factor=factor, **chosen)
    torch.testing.assert_close(torch.tensor(ours.inv_freq), inv_freq, rtol=2e-5, atol=0)
    assert ours.attention_scaling == pytest.approx(scale, rel=1e-6)


IDENTITIES = ["linear", "ntk", "yarn", "llama3", "longrope"]


@pytest.mark.parametrize("scheme", IDENTITIES)
@many
@given(dim=dims, trained=lengths, theta=thetas, ones=st.booleans())
def test_factor_1_keeps_the_frequencies(scheme, dim, trained, theta, ones):
    given_options = {}
    if scheme == "longrope" and ones:
        given_options = dict.fromkeys(("short_factor", "long_factor"), (1.0,) * (dim // 2))
    found = rotation(scheme, geometry(dim, trained, theta), factor=1.0, **given_options)
    assert found.inv_freq == pytest.approx(default_frequencies(dim, theta), rel=1e-12)
    assert found.attention_scaling == 1
    if isinstance(found, FollowingRotation):
        assert found.weights == pytest.approx((0.0,) * (dim // 2), abs=1e-12)


@pytest.mark.parametrize("scheme", IDENTITIES)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@some
@given(length=st.integers(1, 3 * LENGTH), seed=st.integers(0, 99))
def test_factor_1_keeps_the_logits(scheme, kind, length, seed):
    plain, same = _plain_and_identity(scheme, kind)
    ids = tokens(2, length, seed)
    torch.testing.assert_close(logits(same, ids), logits(plain, ids), atol=1e-4, rtol=1e-4)


@cache
def _plain_and_identity(scheme: str, kind: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    given_options = dict(short_factor=[1.0] * 4, long_factor=[1.0] * 4) if scheme == "longrope" else {}
    return tiny(kind), patch_model(tiny(kind), scheme=scheme, factor=1.0, **given_options)


# ---------------------------------------------------------------- sinusoids


def table(positions: Tensor, size: int, base: float, layout: str) -> Tensor:
    """As the package makes it, in fp32."""
    return sinusoids(positions, torch.tensor(default_frequencies(size, base)), layout)


def step_matrix(k: int, size: int, base: float, layout: str) -> np.ndarray:
    """The block rotation with PE(p + k) = M PE(p): sin(a + b) and cos(a + b) written as a matrix."""
    matrix = np.zeros((size, size))
    for i in range(size // 2):
        s, c = (2 * i, 2 * i + 1) if layout == "interleaved" else (i, size // 2 + i)
        angle = k * base ** (-2 * i / size)
        matrix[s, s] = matrix[c, c] = np.cos(angle)
        matrix[s, c], matrix[c, s] = np.sin(angle), -np.sin(angle)
    return matrix


sizes = st.sampled_from([2, 4, 16, 64])
bases = st.sampled_from([100.0, 1_000.0, 10_000.0])


@pytest.mark.parametrize("layout", LAYOUTS)
@many
@given(size=sizes, base=bases, k=st.integers(0, 500))
def test_a_step_is_one_rotation_for_all_positions(layout, size, base, k):
    positions = torch.arange(500)
    matrix = torch.tensor(step_matrix(k, size, base, layout))
    here, there = (table(p, size, base, layout).double() for p in (positions, positions + k))
    torch.testing.assert_close(here @ matrix.T, there, atol=2e-4, rtol=0)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size, dtype=torch.float64))


@pytest.mark.parametrize("layout", LAYOUTS)
@many
@given(size=sizes, base=bases, k=st.integers(0, 500))
def test_dot_products_depend_on_the_difference(layout, size, base, k):
    positions = torch.arange(500)
    here, there = (table(p, size, base, layout) for p in (positions, positions + k))
    dots = (here * there).sum(-1)
    by_hand = sum(np.cos(k * base ** (-2 * i / size)) for i in range(size // 2))
    torch.testing.assert_close(dots, torch.full((500,), float(by_hand)), atol=2e-4 * size, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [32, 128, 768])
def test_dot_products_decay(layout, size):
    rows = table(torch.arange(4000), size, 10_000.0, layout)
    dots = (rows @ rows[0]).abs() / (size / 2)
    near, middle, far = dots[1:20].mean(), dots[100:400].mean(), dots[2000:].mean()
    assert 1 > near > middle > far


@pytest.mark.parametrize("layout", LAYOUTS)
@some
@given(size=sizes, base=bases, start=st.integers(0, 10_000))
def test_sinusoids_are_bounded_and_unique(layout, size, base, start):
    rows = table(torch.arange(start, start + 2000), size, base, layout)
    assert rows.abs().max() <= 1
    assert len(rows.unique(dim=0)) == 2000


@pytest.mark.parametrize("layout", LAYOUTS)
def test_low_channels_of_a_table_are_fast(layout):
    rows = table(torch.arange(3000), 64, 10_000.0, layout)
    sines = rows[:, ::2] if layout == "interleaved" else rows[:, :32]
    crossings = (sines[1:].sign() != sines[:-1].sign()).sum(0).tolist()
    assert crossings == sorted(crossings, reverse=True) and crossings[0] > 900 and crossings[-1] <= 1


# ---------------------------------------------------------------- precision

FAR = 131_072


def bf16(kind: str, scheme: str, order: str) -> PreTrainedModel:
    """A model in bfloat16, cast before or after it is patched."""
    model = tiny(kind)
    if order == "cast first":
        return patch_model(model.to(torch.bfloat16), scheme=scheme, **options(scheme))
    return patch_model(model, scheme=scheme, **options(scheme)).to(torch.bfloat16)


def live_angles(model: PreTrainedModel, kind: str, positions: Tensor) -> Tensor:
    """cos and sin as the model computes them, before it casts them, (tokens, 2 * pairs)."""
    if kind == "gpt2":
        return torch.cat(model.transformer.posenc.angles(positions), -1)[0]
    cos, sin = model.model.rotary_emb(torch.zeros(1), position_ids=positions)
    pairs = cos.shape[-1] // 2
    return torch.cat([cos[..., :pairs], sin[..., :pairs]], -1)[0]


@pytest.mark.parametrize("order", ["cast first", "patch first"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("scheme", ["rope", "yarn"])
def test_bf16_models_tell_131072_positions_apart(kind, scheme, order):
    rows = live_angles(bf16(kind, scheme, order), kind, torch.arange(FAR)[None])
    assert rows.dtype == torch.float32 and rows.shape == (FAR, 8)
    assert len(np.unique(rows.contiguous().numpy().view("V32"))) == FAR
    turning = rotation(scheme, geometry(8, LENGTH), **options(scheme))
    angles = torch.arange(FAR)[:, None].double() * torch.tensor(turning.inv_freq, dtype=torch.float64)
    exact = torch.cat([angles.cos(), angles.sin()], -1) * turning.attention_scaling
    assert (rows.double() - exact).abs().max() < 5e-3


@pytest.mark.parametrize("order", ["cast first", "patch first"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_bf16_models_compute_sinusoids_in_fp32(kind, order):
    base = bf16(kind, "sinusoidal", order).base_model
    module = base.posenc_table if kind == "llama" else base.wpe
    positions = torch.arange(FAR)
    rows = module.vectors(positions[:, None])
    assert rows.dtype == torch.float32 and module(positions[:5]).dtype == torch.bfloat16
    assert len(np.unique(rows.contiguous().numpy().view("V128"))) == FAR
    angles = positions[:, None].double() * torch.tensor(default_frequencies(32, 10_000.0), dtype=torch.float64)
    assert (rows[:, ::2].double() - angles.sin()).abs().max() < 2e-2


# ---------------------------------------------------------------- order


@some
@given(length=st.integers(2, 40), seed=st.integers(0, 99))
def test_an_encoder_without_positions_sees_a_bag(length, seed):
    model, ids = patched_model("none", "bert", 2), tokens(1, length, seed)
    order = torch.randperm(length, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(logits(model, ids[:, order]), logits(model, ids)[:, order], atol=1e-4, rtol=1e-4)


def knows_order(scheme):
    does = effect(scheme, "bert")
    return (does.table, does.rotation, does.bias) != (None, None, None)


@pytest.mark.parametrize("scheme", [s for s in TEXT if exists(s, "bert") and knows_order(s)])
def test_an_encoder_with_positions_sees_order(scheme):
    model, ids = patched_model(scheme, "bert", 2), tokens(1, 24)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    assert (logits(model, ids[:, order]) - logits(model, ids)[:, order]).abs().max() > 1e-2
