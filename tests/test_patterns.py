"""Schemes that change which keys are seen, and at what distance, against dense references from their papers."""

import math

import pytest
import torch
from cells import LENGTH, tiny, tokens
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from hf_posenc import PosencError, check_model, load, patch_model, save, unpatch_model

N = 90
"""Tokens, nearly three times the trained length."""


# --- Distances as the papers define them, pair by pair; None where a pair is not seen.


def self_extend(i, j, w, g):
    return i - j if i - j < w else i // g + w - w // g - j // g


def rerope(i, j, w, k):
    if i - j < w:
        return i - j
    return w if k is None else w + (i - j - w) / k


def string(i, j, s, w):
    return i - j if i - j < s else i - j - s + w


def dca(i, j, s, c):
    if i // s == j // s:
        return i - j
    if i // s == j // s + 1:
        return min(i % s + s, c - 1) - j % s
    return c - 1 - j % s


def streaming(i, j, sinks, w):
    """Positions counted in a cache that holds the sinks and the last w tokens, or all while these are no more."""
    held = list(range(i + 1)) if i < sinks + w else [*range(sinks), *range(i - w + 1, i + 1)]
    return held.index(i) - held.index(j) if j in held else None


def lm_infinite(i, j, first, w):
    if i - j < w:
        return i - j
    return w if j < first else None


def window(i, j, w):
    return i - j if i - j < w else None


def sparse(i, j, w, first, stride):
    return i - j if i - j < w or j < first or i < first or (stride and (i - j) % stride == 0) else None


CASES = {
    "self_extend": (dict(factor=4.0), lambda i, j: self_extend(i, j, 8, 9)),
    "self_extend-own": (dict(factor=4.0, window=5, group=7), lambda i, j: self_extend(i, j, 5, 7)),
    "self_extend-one": (dict(factor=1.0, window=5, group=1), lambda i, j: i - j),
    "rerope": (dict(), lambda i, j: rerope(i, j, 16, None)),
    "rerope-leaky": (dict(target_length=96, window=10, slope=6.0), lambda i, j: rerope(i, j, 10, 6.0)),
    "string": (dict(), lambda i, j: string(i, j, 10, 5)),
    "string-own": (dict(shift=12, window=3), lambda i, j: string(i, j, 12, 3)),
    "dca": (dict(), lambda i, j: dca(i, j, 24, 32)),
    "dca-own": (dict(chunk=11, local_window=5), lambda i, j: dca(i, j, 11, 16)),
    "streaming": (dict(), lambda i, j: streaming(i, j, 4, 28)),
    "streaming-own": (dict(sinks=2, window=9), lambda i, j: streaming(i, j, 2, 9)),
    "lm_infinite": (dict(global_tokens=3, window=20), lambda i, j: lm_infinite(i, j, 3, 20)),
    "window": (dict(window=13), lambda i, j: window(i, j, 13)),
    "window-one": (dict(window=1), lambda i, j: window(i, j, 1)),
    "sparse": (dict(window=6, global_tokens=2, stride=9), lambda i, j: sparse(i, j, 6, 2, 9)),
}


def distances(rule, length):
    """The distance of every pair, NaN where it is not seen."""
    found = torch.full((length, length), math.nan)
    for i in range(length):
        for j in range(i + 1):
            told = rule(i, j)
            found[i, j] = math.nan if told is None else told
    return found


def reference(model, rule, ids, sharp=None):
    """Logits of a LLaMA whose scores are written out pair by pair: q and k are complex numbers, turned."""
    config = model.config
    pairs = config.head_dim // 2
    theta = config.rope_parameters["rope_theta"]
    frequencies = torch.tensor([theta ** (-i / pairs) for i in range(pairs)], dtype=torch.float64)
    told = distances(rule, ids.shape[1]).double()

    def attention(module, query, key, value, attention_mask, scaling, **kwargs):
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        q, k = (torch.complex(*x.double().chunk(2, -1)) for x in (query, key))
        turn = torch.exp(1j * told.nan_to_num()[..., None] * frequencies)  # (i, j, pair)
        scores = torch.einsum("bhip,bhjp,ijp->bhij", q, k.conj(), turn).real * scaling
        if sharp is not None:
            n = torch.arange(1, ids.shape[1] + 1).double().clamp(min=2)
            scores = scores * (n.log() / math.log(sharp)).clamp(min=1)[:, None]
        weights = scores.masked_fill(told.isnan(), -torch.inf).softmax(-1)
        return (weights @ value.double()).transpose(1, 2).to(query.dtype), None

    AttentionInterface.register("pattern_reference", attention)
    AttentionMaskInterface.register("pattern_reference", eager_mask)
    twin = tiny(config.model_type, rope_parameters={"rope_type": "linear", "factor": 1e30, "rope_theta": theta})
    twin.load_state_dict(model.state_dict())
    twin.config._attn_implementation = "pattern_reference"
    with torch.no_grad():
        return twin(ids).logits


def logits(model, ids, **kwargs):
    with torch.no_grad():
        return model(ids, **kwargs).logits


def logits_over_cache(model, ids, steps):
    """Logits from passes over a cache that end at these tokens."""
    past, parts, start = None, [], 0
    for end in steps:
        with torch.no_grad():
            out = model(ids[:, start:end], past_key_values=past, use_cache=True)
        past, start = out.past_key_values, end
        parts.append(out.logits)
    return torch.cat(parts, 1), past


@pytest.mark.parametrize("case", CASES)
def test_against_the_definition(case):
    options, rule = CASES[case]
    model, ids = tiny("llama", head_dim=8), tokens(2, N)
    meant = reference(model, rule, ids)
    patch_model(model, case.partition("-")[0], **options)
    check_model(model)
    torch.testing.assert_close(logits(model, ids), meant, atol=1e-4, rtol=1e-4)
    with torch.enable_grad():  # the way that gradients take
        torch.testing.assert_close(model(ids).logits.detach(), meant, atol=1e-4, rtol=1e-4)
    for steps in ((40, 41, 42, 60, *range(61, N + 1)), range(1, N + 1)):
        torch.testing.assert_close(logits_over_cache(model, ids, steps)[0], meant, atol=1e-4, rtol=1e-4)
    model.set_attn_implementation("hf_posenc_eager")
    torch.testing.assert_close(logits(model, ids), meant, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", ["self_extend", "rerope", "dca", "window", "lm_infinite"])
def test_logit_scaling(case):
    options, rule = CASES[case]
    model, ids = tiny("llama", head_dim=8), tokens(1, N)
    meant = reference(model, rule, ids, sharp=LENGTH)
    patch_model(model, case, logit_scaling=True, **options)
    torch.testing.assert_close(logits(model, ids), meant, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits_over_cache(model, ids, (40, *range(41, N + 1)))[0], meant, atol=1e-4, rtol=1e-4)


FITTING = {
    "self_extend": dict(factor=2.0, window=20, group=4),
    "rerope": dict(window=20),
    "string": dict(shift=20, window=4),
    "dca": dict(chunk=20, local_window=12),
    "streaming": dict(sinks=4, window=20),
    "lm_infinite": dict(global_tokens=4, window=20),
    "window": dict(window=20),
    "sparse": dict(window=20, global_tokens=0),
}


@pytest.mark.parametrize("scheme", FITTING)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
def test_a_text_within_the_window_is_plain_and_one_token_more_is_not(kind, scheme):
    model = tiny(kind)
    inside, outside = tokens(2, 20), tokens(2, 21)
    plain = logits(model, inside), logits(model, outside)
    patch_model(model, scheme, **FITTING[scheme])
    torch.testing.assert_close(logits(model, inside), plain[0], atol=1e-4, rtol=1e-4)
    found = logits(model, outside)
    torch.testing.assert_close(found[:, :20], plain[1][:, :20], atol=1e-4, rtol=1e-4)
    changes = scheme not in ("dca", "self_extend", "streaming", "lm_infinite", "rerope")
    # At window + 1 only the first key is further away; what caps or groups it may leave it where it was.
    if changes:
        assert (found[:, 20] - plain[1][:, 20]).abs().max() > 1e-3
    unpatch_model(model)
    assert torch.equal(logits(model, outside), plain[1])


@pytest.mark.parametrize("case", CASES)
def test_left_padding_and_longer_neighbours_change_nothing(case):
    options, _ = CASES[case]
    model = patch_model(tiny("llama", head_dim=8), case.partition("-")[0], **options)
    ids, short = tokens(2, N), 50
    alone = logits(model, ids[:1, :short])
    batch = ids.clone()
    batch[0, :] = 0
    batch[0, N - short :] = ids[0, :short]
    mask = torch.ones_like(batch)
    mask[0, : N - short] = 0
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    found = logits(model, batch, attention_mask=mask, position_ids=places)
    torch.testing.assert_close(found[:1, N - short :], alone, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found[1:], logits(model, ids[1:]), atol=1e-4, rtol=1e-4)
    generated = model.generate(batch, attention_mask=mask, min_new_tokens=12, max_new_tokens=12, do_sample=False)
    lone = model.generate(
        ids[:1, :short], attention_mask=mask[:1, -short:], min_new_tokens=12, max_new_tokens=12, do_sample=False
    )
    assert torch.equal(generated[0, N:], lone[0, short:])


@pytest.mark.parametrize("scheme", FITTING)
def test_checkpoints_are_sealed(scheme, tmp_path):
    model, ids = patch_model(tiny("llama"), scheme, **FITTING[scheme]), tokens(2, 60)
    save(model, tmp_path / "saved")
    assert torch.equal(logits(load(tmp_path / "saved"), ids), logits(model, ids))
    for forced in ({}, {"attn_implementation": "sdpa"}, {"attn_implementation": "eager"}):
        with pytest.raises((ValueError, KeyError)):
            type(model).from_pretrained(tmp_path / "saved", **forced)


def test_streaming_keeps_a_cache_of_fixed_size():
    model = patch_model(tiny("llama"), "streaming", sinks=4, window=20)
    past, sizes = None, set()
    for step in range(60):
        with torch.no_grad():
            out = model(tokens(1, 50, seed=step), past_key_values=past, use_cache=True)
        past = out.past_key_values
        sizes.add(past.layers[0].keys.shape[2])
        assert out.logits.isfinite().all()
    assert sizes == {4 + 19}
    assert past.get_seq_length() == 60 * 50


def test_streaming_refuses_other_caches():
    from transformers import DynamicCache, StaticCache

    model, ids = patch_model(tiny("llama"), "streaming"), tokens(1, 10)
    with pytest.raises(PosencError, match="StaticCache"):
        model(ids, past_key_values=StaticCache(config=model.config, max_cache_len=64))
    filled = DynamicCache(config=model.config)
    tiny("llama")(ids, past_key_values=filled)
    with pytest.raises(PosencError, match="empty"):
        model(ids, past_key_values=filled)


@pytest.mark.parametrize("name", ["window", "sparse"])
@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_tables_and_encoders(family, name):
    """Against an explicit mask on the unpatched model, in float and 4-D."""
    model, ids = tiny(family), tokens(2, 30)
    options = dict(window=5) if name == "window" else dict(window=5, global_tokens=2, stride=7)
    i, j = torch.arange(30)[:, None], torch.arange(30)
    seen = (i - j).abs() < 5
    if name == "sparse":
        seen = seen | (i < 2) | (j < 2) | ((i - j) % 7 == 0)
    if family == "gpt2":
        seen = seen & (j <= i)
    mask = torch.zeros(30, 30).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None].expand(2, 1, 30, 30)
    meant = logits(model, ids, attention_mask=mask)
    patch_model(model, name, **options)
    check_model(model)
    torch.testing.assert_close(logits(model, ids), meant, atol=1e-4, rtol=1e-4)


def test_a_sealed_table_is_refused_and_comes_back(tmp_path):
    model, ids = patch_model(tiny("gpt2"), "window", window=5), tokens(2, 30)
    save(model, tmp_path / "saved")
    assert torch.equal(logits(load(tmp_path / "saved"), ids), logits(model, ids))
    for forced in ({}, {"attn_implementation": "sdpa"}):
        with pytest.raises((ValueError, RuntimeError)):
            type(model).from_pretrained(tmp_path / "saved", **forced)
    other = patch_model(tiny("gpt2", seed=3), "window", window=5)
    other.load_state_dict(model.state_dict())
    assert torch.equal(logits(other, ids), logits(model, ids))


def test_random_blocks_do_not_depend_on_the_length_and_follow_the_seed():
    from hf_posenc.core.patterns import Scattered

    def seen(length, seed=0, causal=True):
        pattern = Scattered(causal=causal, window=1, random_blocks=2, block=4, seed=seed)
        places = torch.arange(length)[None]
        return pattern.visible(places, places)[0]

    assert torch.equal(seen(64)[:40, :40], seen(40))
    assert not torch.equal(seen(64), seen(64, seed=1))
    assert seen(64)[-1].sum() <= 1 + 2 * 4
    both = seen(64, causal=False)
    assert torch.equal(both, both.T)


@pytest.mark.parametrize(
    "scheme, options, message",
    [
        ("self_extend", {}, "target_length"),
        ("self_extend", dict(factor=4.0, window=40), "below the trained length"),
        ("self_extend", dict(factor=4.0, window=8, group=2), "a group of 5"),
        ("rerope", dict(window=32), "below the trained length"),
        ("rerope", dict(target_length=320, slope=2.0), "slope of"),
        ("string", dict(shift=9, window=9), "below shift=9"),
        ("string", dict(target_length=64), "up to 37 tokens"),
        ("dca", dict(chunk=30, local_window=10), "together"),
        ("streaming", dict(window=40), "fit into"),
        ("window", dict(window=0), "positive"),
    ],
)
def test_options_that_cannot_work(scheme, options, message):
    model, ids = tiny("llama"), tokens(1, 9)
    before = logits(model, ids)
    with pytest.raises(PosencError, match=message):
        patch_model(model, scheme, **options)
    assert torch.equal(logits(model, ids), before)


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
@pytest.mark.parametrize("scheme", ["window", "sparse"])
def test_a_table_that_is_kept_keeps_its_rows(scheme, kind, tmp_path):
    """Whatever length the model is said to have been trained at: a config that says less could not be loaded."""
    model = tiny(kind, max_position_embeddings=128)
    patch_model(model, scheme, window=6, trained_length=32, temperature="log")
    assert model.config.max_position_embeddings == 128
    save(model, tmp_path / "a")
    again = load(tmp_path / "a")
    assert again.config.max_position_embeddings == 128
    assert torch.equal(logits(again, tokens(1, 90)), logits(model, tokens(1, 90)))


@pytest.mark.parametrize("scheme", ["self_extend", "rerope", "dca", "streaming", "lm_infinite"])
def test_models_without_rope_are_refused(scheme):
    with pytest.raises(PosencError, match="has no RoPE"):
        patch_model(tiny("gpt2"), scheme, **({"factor": 2.0} if scheme == "self_extend" else {}))
