"""The maths of every scheme, with numbers worked out by hand."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from hf_posenc import SCHEMES, PosencError
from hf_posenc.core.effects import FollowingRotation, Geometry
from hf_posenc.runtime.rotation import rotate
from hf_posenc.schemes import frequencies as fr
from hf_posenc.schemes.alibi import LinearBias, slopes
from hf_posenc.schemes.learned import RESIZE, cubic_rows, cyclic_rows, hierarchical_rows, linear_rows
from hf_posenc.schemes.sinusoidal import sinusoids
from hf_posenc.schemes.t5 import bucket


def geometry(**changes) -> Geometry:
    shape = dict(hidden_size=32, num_heads=4, head_dim=8, rotary_dim=8, trained_length=32, causal=True)
    return Geometry(**{**shape, **changes})


# ---------------------------------------------------------------- biases


def test_slopes_of_8_heads():
    assert slopes(8) == (1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256)


def test_slopes_of_12_heads():
    """Those of 8 heads, then the 1st, 3rd, 5th and 7th of 16 heads: 2^-0.5, 2^-1.5, 2^-2.5, 2^-3.5."""
    filled = (0.7071067811865476, 0.35355339059327373, 0.17677669529663687, 0.08838834764831843)
    assert slopes(12) == pytest.approx((*slopes(8), *filled), rel=1e-12)


def test_slopes_with_another_maximum():
    assert slopes(4, bias_max=4.0) == (1 / 2, 1 / 4, 1 / 8, 1 / 16)
    assert slopes(1) == (1 / 256,)


def test_linear_bias_by_hand():
    bias = LinearBias((0.5, 0.25), causal=False)(torch.tensor([[0, 3]]), torch.tensor([[0, 1, 3]]))
    assert bias.tolist() == [[[[0, -0.5, -1.5], [-1.5, -1, 0]], [[0, -0.25, -0.75], [-0.75, -0.5, 0]]]]


def test_key_slopes_only_behind_a_causal_mask():
    assert LinearBias((0.5,), causal=True).key_slopes.tolist() == [0.5]
    assert LinearBias((0.5,), causal=False).key_slopes is None


def test_t5_causal_buckets_by_hand():
    """16 exact; then 16 + floor(16 * ln(d/16) / ln 8): 17.7 at 20, 26.7 at 64, 31.4 at 120."""
    back = {0: 0, 1: 1, 15: 15, 16: 16, 20: 17, 64: 26, 120: 31, 128: 31, 5000: 31}
    distance = -torch.tensor(list(back))
    assert bucket(distance, 32, 128, bidirectional=False).tolist() == list(back.values())
    assert bucket(torch.tensor([1, 50]), 32, 128, bidirectional=False).tolist() == [0, 0]


def test_t5_bidirectional_buckets_by_hand():
    """8 exact a side; then 8 + floor(8 * ln(d/8) / ln 16): 9.17 at 12, 12.0 at 32; keys ahead come 16 later."""
    one_side = {0: 0, 1: 1, 7: 7, 8: 8, 12: 9, 33: 12, 128: 15, 900: 15}
    distance = torch.tensor(list(one_side))
    behind = list(one_side.values())
    assert bucket(-distance, 32, 128, bidirectional=True).tolist() == behind
    assert bucket(distance, 32, 128, bidirectional=True).tolist() == [0] + [16 + b for b in behind[1:]]


# ---------------------------------------------------------------- frequencies


def test_default_frequencies():
    assert fr.default_frequencies(8, 10_000.0) == pytest.approx((1.0, 0.1, 0.01, 0.001))
    assert fr.default_frequencies(4, 100.0) == pytest.approx((1.0, 0.1))


def test_linear_frequencies():
    assert fr.linear_frequencies((1.0, 0.1), 4.0) == (0.25, 0.025)


def test_ntk_theta():
    assert fr.ntk_theta(10_000.0, 8.0, 8) == pytest.approx(160_000.0)  # 8^(8/6) = 16
    assert fr.ntk_theta(10_000.0, 4.0, 128) == pytest.approx(40_889.94, rel=1e-6)


def test_ntk_keeps_the_first_pair_and_slows_the_last_by_alpha():
    found = fr.ntk_frequencies((1.0, 0.1, 0.01, 0.001), 8.0)
    assert found == pytest.approx((1.0, 0.1 / 2, 0.01 / 4, 0.001 / 8))
    assert found == pytest.approx(fr.default_frequencies(8, 160_000.0))


@pytest.mark.parametrize("length, theta, alpha", [(4096, 10_000.0, 6.676), (8192, 500_000.0, 12.12)])
def test_ntk_alpha_that_covers_the_target(length, theta, alpha):
    """Heads of 128, factor 4: pair 46 of LLaMA-2 and pair 35 of Llama 3 are the first waves longer than trained."""
    shape = dict(head_dim=128, rotary_dim=128, trained_length=length, rope={"rope_theta": theta})
    found = SCHEMES["ntk"](factor=4.0, alpha="cover").effect(geometry(**shape)).rotation.inv_freq
    plain = fr.default_frequencies(128, theta)
    assert plain[-1] / found[-1] == pytest.approx(alpha, rel=1e-3)
    longer = [p / f for p, f in zip(plain, found, strict=True) if 2 * math.pi / p > length]
    assert min(longer) == pytest.approx(4.0)


def test_yarn_bounds_of_llama_2():
    """d 128, 4,096 tokens: 32 turns at pair 20.94, one turn at pair 45.03, so the ramp runs from 20 to 46."""
    plain = fr.default_frequencies(128, 10_000.0)
    assert fr.pair_index(plain, 32.0, 4096) == pytest.approx(20.94, abs=0.01)
    assert fr.pair_index(plain, 1.0, 4096) == pytest.approx(45.03, abs=0.01)
    found = fr.yarn_frequencies(plain, 4.0, 4096, 32.0, 1.0, truncate=True)
    ratio = [f / p for f, p in zip(found, plain, strict=True)]
    assert ratio[:21] == pytest.approx([1.0] * 21) and ratio[46:] == pytest.approx([0.25] * 18)
    assert ratio[33] == pytest.approx(0.5 + 0.5 / 4)  # by index; by turns it would be 0.15 + 0.85 / 4
    assert ratio[21] == pytest.approx(25 / 26 + 1 / 26 / 4)


def test_yarn_untruncated():
    plain = fr.default_frequencies(128, 10_000.0)
    found = fr.yarn_frequencies(plain, 4.0, 4096, 32.0, 1.0, truncate=False)
    slowed = (33 - 20.9444) / (45.0307 - 20.9444)
    assert found[33] / plain[33] == pytest.approx(1 - slowed + slowed / 4, abs=1e-4)


def test_yarn_attention_factor():
    assert fr.yarn_attention_factor(1.0) == 1.0
    assert fr.yarn_attention_factor(4.0) == pytest.approx(1.1386294361)
    assert fr.yarn_attention_factor(16.0) == pytest.approx(1.2772588722)
    assert fr.yarn_attention_factor(40.0, 1.0, 1.0) == 1.0
    # (0.1 * 1 * ln 40 + 1) / (0.1 * 0.5 * ln 40 + 1) = 1.3688879 / 1.1844440
    assert fr.yarn_attention_factor(40.0, 1.0, 0.5) == pytest.approx(1.1557219, rel=1e-6)


def test_llama3_bands():
    """8,192 tokens: waves under 2,048 kept, over 8,192 slowed by 8; 4,096 turns twice, a third of the way."""
    waves = (1000.0, 2048.0, 4096.0, 8192.0, 100_000.0)
    found = fr.llama3_frequencies([2 * math.pi / w for w in waves], 8.0, 8192, 1.0, 4.0)
    kept = [f * w / (2 * math.pi) for f, w in zip(found, waves, strict=True)]
    assert kept == pytest.approx([1.0, 1.0, 1 / 3 + 2 / 3 / 8, 1 / 8, 1 / 8])


def test_longrope():
    assert fr.longrope_frequencies((1.0, 0.1), (1.0, 4.0)) == (1.0, 0.025)
    assert fr.longrope_attention_factor(1.0, 4096) == 1.0
    assert fr.longrope_attention_factor(32.0, 4096) == pytest.approx(math.sqrt(1 + 5 / 12))  # ln 2^5 / ln 2^12


def test_clip():
    """At L = 32 the waves of 6.3 and 62.8 tokens lie on either side of the cut; CoPE fades the last 20 of 64."""
    plain = fr.default_frequencies(8, 10_000.0)
    shape = geometry(
        head_dim=8, rotary_dim=8, rope={"rope_type": "default", "rope_theta": 10_000.0}, trained_length=32
    )
    assert SCHEMES["clip"]().effect(shape).rotation.inv_freq == pytest.approx((1.0, 0.0, 0.0, 0.0))
    for length, left in ((6, 0), (7, 1), (62, 1), (63, 2), (628, 2), (629, 3), (10_000, 4)):
        found = (
            SCHEMES["clip"](trained_length=length).effect(dataclasses.replace(shape, trained_length=length)).rotation
        )
        assert found.inv_freq == (*plain[:left], *[0.0] * (4 - left))
        portion = {"rope_type": "proportional", "rope_theta": 10_000.0, "partial_rotary_factor": left / 4}
        same = {"rope_type": "default", "rope_theta": 10_000.0}
        assert found.rope_parameters == (same if left == 4 else portion)
    for pairs in (0, 1, 4):  # what is not cut is as it was
        assert SCHEMES["clip"](pairs=pairs).effect(shape).rotation.inv_freq == (*plain[: 4 - pairs], *[0.0] * pairs)
    wide = fr.default_frequencies(128, 500_000.0)
    cope = geometry(head_dim=128, rotary_dim=128, rope={"rope_type": "default", "rope_theta": 500_000.0})
    found = SCHEMES["clip"](pairs=20, taper=True).effect(cope).rotation
    fading = [0.5 * (1 + math.cos(t)) for t in np.linspace(0, math.pi, 20)]
    assert found.inv_freq == pytest.approx([*wide[:44], *(f * w for f, w in zip(wide[44:], fading, strict=True))])
    assert found.rope_parameters is None and found.inv_freq[-1] == 0
    with pytest.raises(PosencError, match="more than the 4 pairs"):
        SCHEMES["clip"](pairs=5).effect(shape)


def test_proportional():
    assert fr.proportional_frequencies(8, 10_000.0, 0.75, 1.0) == pytest.approx((1.0, 0.1, 0.01, 0.0))
    assert fr.proportional_frequencies(8, 10_000.0, 0.5, 4.0) == pytest.approx((0.25, 0.025, 0.0, 0.0))
    assert fr.proportional_frequencies(8, 10_000.0, 0.0, 1.0) == (0.0,) * 4


def test_stages_of_dynamic_ntk():
    """Trained at 32, steps of 8: none up to 32, then one for each 8 begun; growth is ln(1 + factor * grown part)."""
    rotation = SCHEMES["dynamic_ntk"](factor=2.0, step=8).effect(geometry()).rotation
    assert isinstance(rotation, FollowingRotation)
    assert rotation.stage(torch.tensor([1, 31, 32, 33, 40, 41, 64])).tolist() == [0, 0, 0, 1, 1, 2, 4]
    growth = rotation.growth(torch.tensor([0, 1, 4]))
    torch.testing.assert_close(growth, torch.tensor([0.0, math.log(1.5), math.log(3.0)]))
    assert rotation.weights == pytest.approx((0, 1 / 3, 2 / 3, 1))


def test_default_step_is_a_sixteenth_of_the_trained_length():
    for length, step in ((32, 2), (4096, 256), (8, 1)):
        assert SCHEMES["dynamic_ntk"]().effect(geometry(trained_length=length)).rotation.step == step


def test_stages_of_longrope():
    rotation = SCHEMES["longrope"](factor=4.0).effect(geometry()).rotation
    assert isinstance(rotation, FollowingRotation)
    assert rotation.stage(torch.tensor([1, 32, 33, 1000])).tolist() == [0, 0, 1, 1]
    assert rotation.growth(torch.tensor([0, 1])).tolist() == [0.0, 1.0]


def test_a_quarter_turn():
    """(1, 0) becomes (0, 1) in the pair (0, 2); the pair (1, 3) stays, as does what is past the rotated channels."""
    x = torch.tensor([1.0, 5.0, 0.0, 7.0, 9.0]).view(1, 1, 1, 5)
    angle = torch.tensor([[[math.pi / 2, 0.0]]])
    turned = rotate(x, (angle.cos(), angle.sin()))
    torch.testing.assert_close(turned.flatten(), torch.tensor([0.0, 5.0, 1.0, 7.0, 9.0]), atol=1e-6, rtol=0)


# ---------------------------------------------------------------- tables


def test_sinusoids_by_hand():
    inv_freq = torch.tensor([1.0, 0.01])
    wanted = [math.sin(3), math.cos(3), math.sin(0.03), math.cos(0.03)]
    at = torch.tensor([3])
    torch.testing.assert_close(sinusoids(at, inv_freq, "interleaved")[0], torch.tensor(wanted))
    wanted = [wanted[0], wanted[2], wanted[1], wanted[3]]
    torch.testing.assert_close(sinusoids(at, inv_freq, "concatenated")[0], torch.tensor(wanted))


def random_table(rows: int = 12, size: int = 6) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(0))


def resized(table: Tensor, rows: int, how: str) -> Tensor:
    return hierarchical_rows(table, rows, 0.4) if how == "hierarchical" else RESIZE[how](table, rows)


@pytest.mark.parametrize("how", ["linear", "cubic"])
@pytest.mark.parametrize("times", [2, 3, 4, 5, 8])
def test_stretching_puts_old_rows_at_multiples(how, times):
    table = random_table()
    longer = resized(table, times * len(table), how)
    assert longer.shape == (times * len(table), table.shape[1])
    torch.testing.assert_close(longer[::times], table, atol=1e-5, rtol=1e-5)
    assert len(longer.unique(dim=0)) == len(longer)


def test_linear_rows_by_hand():
    table = torch.tensor([[0.0, 10.0], [4.0, 20.0], [2.0, 20.0]])
    wanted = [[0, 10], [2, 15], [4, 20], [3, 20], [2, 20], [1, 20]]  # the last piece is continued
    assert linear_rows(table, 6).tolist() == wanted


def test_cubic_rows_by_hand():
    """Halfway between rows a Catmull-Rom spline is (-a + 9b + 9c - d) / 16, with the ends continued straight."""
    table = torch.tensor([[0.0], [4.0], [2.0], [8.0]])
    found = cubic_rows(table, 8).flatten().tolist()
    assert found[1] == pytest.approx((4 + 9 * 0 + 9 * 4 - 2) / 16)
    assert found[3] == pytest.approx((-0 + 9 * 4 + 9 * 2 - 8) / 16)
    assert found[5] == pytest.approx((-4 + 9 * 2 + 9 * 8 - 14) / 16)


@pytest.mark.parametrize("how", ["linear", "cubic"])
@pytest.mark.parametrize("rows", [16, 24, 30, 37])
def test_stretching_a_line_gives_that_line(how, rows):
    line = torch.arange(8.0)[:, None] * torch.tensor([1.0, -2.0]) + 3
    places = torch.arange(rows) * 8 / rows
    wanted = places[:, None] * torch.tensor([1.0, -2.0]) + 3
    torch.testing.assert_close(resized(line, rows, how), wanted, atol=1e-4, rtol=1e-5)


def test_cubic_gives_a_parabola_back_where_it_knows_both_sides():
    at = torch.arange(10.0)
    places = torch.arange(40) / 4
    inner = (places >= 1) & (places <= 8)
    found = cubic_rows((at**2 - 3 * at)[:, None], 40)[:, 0]
    torch.testing.assert_close(found[inner], (places**2 - 3 * places)[inner], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("rows", [13, 24, 30])
def test_cyclic_repeats(rows):
    table = random_table()
    longer = cyclic_rows(table, rows)
    assert all(torch.equal(longer[p], table[p % 12]) for p in range(rows))


@pytest.mark.parametrize("alpha", [0.4, 0.25, 0.6])
def test_hierarchical(alpha):
    """Row i*n + j is alpha*u_i + (1 - alpha)*u_j, and the first n are the table's own bit for bit."""
    table, n = random_table(), 12
    longer = hierarchical_rows(table, n * n, alpha)
    assert torch.equal(longer[:n], table)
    u = [(row - alpha * table[0]) / (1 - alpha) for row in table]
    for i, j in ((0, 5), (1, 0), (1, 7), (3, 2), (11, 11)):
        torch.testing.assert_close(longer[i * n + j], alpha * u[i] + (1 - alpha) * u[j], atol=1e-5, rtol=1e-5)
    assert len(longer.unique(dim=0)) == n * n


@pytest.mark.parametrize("how", RESIZE)
def test_resizing_to_the_same_size_is_the_identity(how):
    table = random_table()
    torch.testing.assert_close(resized(table, len(table), how), table, atol=1e-6, rtol=0)
    source = SCHEMES["learned"](resize=how).effect(geometry(trained_length=12, hidden_size=6)).table
    native = torch.nn.Embedding.from_pretrained(table)
    assert torch.equal(source.module(native, table).weight, table)


@pytest.mark.parametrize("how", RESIZE)
def test_resizing_starts_from_the_trained_rows_only(how):
    """A table longer than what was trained: the rows past it are noise."""
    table = random_table(20)
    scheme = SCHEMES["learned"](resize=how, target_length=30, trained_length=12)
    source = scheme.effect(geometry(trained_length=12, hidden_size=6)).table
    found = source.module(torch.nn.Embedding.from_pretrained(table), table).weight
    assert torch.equal(found, resized(table[:12], 30, how))


def test_hierarchical_has_an_end():
    scheme = SCHEMES["learned"](resize="hierarchical", target_length=145)
    with pytest.raises(PosencError, match="144"):
        scheme.effect(geometry(trained_length=12))


# ---------------------------------------------------------------- the smallest sizes


@pytest.mark.parametrize(
    "scheme, options, shape",
    [
        ("ntk", dict(factor=4.0), dict(head_dim=2, rotary_dim=2)),
        ("longrope", dict(factor=4.0), dict(trained_length=1)),
        ("learned", dict(target_length=4, resize="linear"), dict(trained_length=1)),
        ("learned", dict(target_length=4, resize="cubic"), dict(trained_length=1)),
        ("learned", dict(target_length=4, resize="cyclic"), dict(trained_length=1)),
    ],
)
def test_the_smallest_sizes_work_or_are_refused(scheme, options, shape):
    """A head of one pair, one trained token: a number or a PosencError, never a stray error of Python's."""
    try:
        effect = SCHEMES[scheme](**options).effect(geometry(**shape))
        if effect.table is not None:
            native = torch.nn.Embedding(1, 32)
            assert effect.table.module(native, native.weight).weight.isfinite().all()
        else:
            assert all(math.isfinite(f) for f in effect.rotation.inv_freq)
    except PosencError:
        pass
