"""Patched models in the hands of their users: heads, cross-attention, compilers, windows, unusual positions."""

import copy

import pytest
import torch
import transformers
from cells import CAUSAL, LENGTH, TEXT, effect, options, tiny, tokens
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.cache_utils import DynamicLayer
from transformers.models.t5.modeling_t5 import T5Attention

from hf_posenc import SCHEMES, PosencError, check_model, is_patched, patch_model, unpatch_model

LONG = 3 * LENGTH
TOL = 2e-4

HEADS = {
    "llama": ["Model", "ForCausalLM", "ForSequenceClassification", "ForQuestionAnswering", "ForTokenClassification"],
    "gpt2": [
        *["Model", "LMHeadModel", "DoubleHeadsModel", "ForSequenceClassification", "ForQuestionAnswering"],
        "ForTokenClassification",
    ],
    "bert": [
        *["Model", "ForPreTraining", "ForMaskedLM", "ForNextSentencePrediction", "ForSequenceClassification"],
        *["ForMultipleChoice", "ForTokenClassification", "ForQuestionAnswering"],
    ],
    "bert_decoder": ["Model", "LMHeadModel"],
}
PREFIX = {"llama": "Llama", "gpt2": "GPT2", "bert": "Bert", "bert_decoder": "Bert"}
ALL_HEADS = [(kind, name) for kind, names in HEADS.items() for name in names]
ONE_PER_SITE = ["none", "sinusoidal", "learned", "alibi", "t5", "rope", "yarn", "dynamic_ntk"]
CROSS = {"gpt2": "crossattention", "bert_decoder": "crossattention.self"}


def patched_model(scheme, kind, **overrides):
    return patch_model(tiny(kind, **overrides), scheme, **options(scheme))


@torch.no_grad()
def logits(model, ids=None, **inputs):
    return model(ids, **inputs).logits


def assert_same(actual, expected, tolerance=TOL):
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)


def in_chunks(model, ids, cache, chunks, **inputs):
    """Logits of one text that is given piece by piece."""
    assert sum(chunks) == ids.shape[1]
    parts = []
    for part in ids.split(chunks, 1):
        with torch.no_grad():
            output = model(part, past_key_values=cache, use_cache=True, **inputs)
        cache = output.past_key_values
        parts.append(output.logits)
    return torch.cat(parts, 1)


# --- heads ---


def with_head(kind, name):
    torch.manual_seed(0)
    return getattr(transformers, PREFIX[kind] + name)(tiny(kind).config).eval()


@torch.no_grad()
def answers(model):
    """Every tensor that a model with any head gives."""
    choices = "MultipleChoice" in type(model).__name__ or "DoubleHeads" in type(model).__name__
    ids = tokens(6, LENGTH).view(2, 3, LENGTH) if choices else tokens(2, LENGTH)
    return [t for t in model(ids, use_cache=False).to_tuple() if isinstance(t, torch.Tensor)]


def all_equal(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize(("kind", "name"), ALL_HEADS)
@pytest.mark.parametrize("scheme", ONE_PER_SITE)
def test_any_head_patches_and_unpatches(scheme, kind, name):
    model = with_head(kind, name)
    before = answers(model)
    patch_model(model, scheme, **options(scheme))
    check_model(model)
    changed = answers(model)
    identical = kind == "llama" and scheme in ("rope", "dynamic_ntk")
    assert all_equal(before, changed) == identical
    base = with_head(kind, name)
    patch_model(base.base_model, scheme, **options(scheme))
    assert is_patched(base)
    check_model(base)
    assert all_equal(answers(base), changed)
    for patched_one in (model, base):
        unpatch_model(patched_one)
        assert not is_patched(patched_one)
        assert all_equal(answers(patched_one), before)


# --- cross-attention ---


def layers(model):
    return model.base_model.h if hasattr(model.base_model, "h") else model.base_model.encoder.layer


def encode(rows=2, length=11):
    states = torch.randn(rows, length, 32, generator=torch.Generator().manual_seed(5))
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[0, -4:] = 0
    return dict(encoder_hidden_states=states, encoder_attention_mask=mask)


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", CROSS)
@pytest.mark.parametrize("scheme", TEXT)
def test_cross_attention_is_left_alone(scheme, kind, kernel):
    """What the cross-attention of a patched model is given, that of an unpatched one answers in the same way."""
    settings = dict(add_cross_attention=True, attn_implementation=kernel)
    model, plain = patched_model(scheme, kind, **settings), tiny(kind, **settings)
    calls = []
    for layer in layers(model):
        layer.get_submodule(CROSS[kind]).register_forward_hook(lambda *call: calls.append(call[1:]), with_kwargs=True)
    logits(model, tokens(2, LONG), use_cache=False, **encode())
    assert len(calls) == 2
    for layer, (args, kwargs, output) in zip(layers(plain), calls, strict=True):
        with torch.no_grad():
            expected = layer.get_submodule(CROSS[kind])(*args, **kwargs)
        assert_same(output[0], expected[0], 1e-5)


@pytest.mark.parametrize("kind", CROSS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_decoding_beside_an_encoder_equals_a_full_pass(scheme, kind):
    model, ids = patched_model(scheme, kind, add_cross_attention=True), tokens(2, LONG)
    full = logits(model, ids, use_cache=False, **encode())
    assert (full - logits(model, ids, use_cache=False, **encode(length=9))).abs().max() > 0.01
    assert_same(logits(model, ids, use_cache=True, **encode()), full)
    chunks = [20, 1, 1, 30, 1, LONG - 53]
    assert_same(in_chunks(model, ids, None, chunks, **encode()), full)
    static = StaticCache(config=model.config, max_cache_len=LONG + 3)
    both = EncoderDecoderCache(static, DynamicCache(config=model.config))
    assert_same(in_chunks(model, ids, both, chunks, **encode()), full)


# --- numbers ---


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert", "bert_decoder"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_fp16_is_finite_and_close_to_fp32(scheme, kind):
    """Close to the same weights, rounded to fp16, computed in fp32."""
    ids = tokens(1, LONG)
    exact = patched_model(scheme, kind).half().float()
    expected = logits(exact, ids)
    output = logits(patched_model(scheme, kind).half(), ids).float()
    assert torch.isfinite(output).all()
    assert (output - expected).abs().mean() < 0.01


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert", "bert_decoder"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_inputs_embeds_do_as_well_as_ids(scheme, kind):
    model, ids = patched_model(scheme, kind), tokens(2, LONG)
    embeds = model.get_input_embeddings()(ids).detach()
    assert torch.equal(logits(model, inputs_embeds=embeds), logits(model, ids))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert", "bert_decoder"])
@pytest.mark.parametrize("scheme", ["alibi", "t5", "rope", "dynamic_ntk", "sinusoidal"])
def test_attention_weights_sum_to_one_and_skip_padding(scheme, kind):
    model, ids = patched_model(scheme, kind, attn_implementation="eager"), tokens(2, LONG)
    mask = torch.ones_like(ids)
    mask[0, -30:] = 0
    with torch.no_grad():
        weights = model(ids, attention_mask=mask, output_attentions=True).attentions
    assert len(weights) == 2
    for layer in weights:
        assert layer.shape == (2, 4, LONG, LONG)
        assert_same(layer.sum(-1), torch.ones(2, 4, LONG), 1e-5)
        assert (layer[0, :, :, -30:] == 0)[:, : LONG - 30].all()
        if kind in CAUSAL:
            assert (layer[1].triu(1) == 0).all()


# --- positions that are not 0, 1, 2, ... ---

JUMPING = torch.cat([torch.arange(10), torch.arange(50, 70), torch.arange(200, 210)])[None]


def explicit_bias(scheme, model, positions, causal):
    """The bias written out, from the paper's slopes or from T5's own code."""
    distance = positions[:, None, :] - positions[:, :, None]
    if scheme == "alibi":
        slopes = torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256])
        return -slopes.view(1, 4, 1, 1) * distance[:, None].abs()
    buckets = T5Attention._relative_position_bucket(distance, bidirectional=not causal)
    return model.base_model.posenc_bias.weight.detach()[buckets].permute(0, 3, 1, 2)


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert", "bert_decoder"])
@pytest.mark.parametrize("scheme", ["alibi", "t5"])
def test_biases_go_by_position_ids(scheme, kind, kernel):
    """Skipped positions (PoSE): the same as a model without positions whose mask holds the bias."""
    model, ids = patched_model(scheme, kind, attn_implementation=kernel), tokens(1, JUMPING.shape[1])
    causal = kind in CAUSAL
    bias = explicit_bias(scheme, model, JUMPING, causal)
    if causal:
        bias = bias.masked_fill(torch.ones_like(bias).triu(1).bool(), torch.finfo(torch.float32).min)
    reference = patched_model("none", kind, attn_implementation="eager")
    inputs = {"use_cache": False} if causal else {}
    expected = logits(reference, ids, attention_mask=bias, **inputs)
    output = logits(model, ids, attention_mask=torch.ones_like(ids), position_ids=JUMPING, **inputs)
    assert_same(output, expected)
    straight = logits(model, ids, attention_mask=torch.ones_like(ids), **inputs)
    assert (output - straight).abs().max() > 0.01


def causal_mask(length):
    return torch.ones(length, length).tril().bool()[None, None]


def caches(model, size):
    return [DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=size)]


FOLLOWING = ["dynamic_ntk", "longrope"]
NEEDS_KEY_POSITIONS = ["alibi", "t5", *FOLLOWING]
"""Schemes that must know where cached keys stand; the others put it into the keys."""
gap_cells = [(scheme, kind) for scheme in [*ONE_PER_SITE, "longrope"] for kind in ("llama", "gpt2", "bert_decoder")]


@pytest.mark.parametrize("which", [0, 1], ids=["dynamic", "static"])
@pytest.mark.parametrize("chunks", [[35, 5], [35, 1, 1, 1, 1, 1], [30, 10], [10, 30], [5, 35]], ids=str)
@pytest.mark.parametrize(("scheme", "kind"), gap_cells)
def test_going_on_from_positions_that_jump_is_right(scheme, kind, chunks, which):
    """The jumps may be in the cached text, in the text that is added, or between the two."""
    length = JUMPING.shape[1]
    size = options(scheme) | ({"target_length": 256} if scheme == "learned" else {})
    model, ids = patch_model(tiny(kind), scheme, **size), tokens(1, length)
    expected = logits(model, ids, position_ids=JUMPING, attention_mask=causal_mask(length), use_cache=False)
    cache = caches(model, length)[which]

    def run():
        parts, start = [], 0
        for count in chunks:
            here = slice(start, start + count)
            inputs = dict(position_ids=JUMPING[:, here], attention_mask=torch.ones(1, here.stop))
            parts.append(logits(model, ids[:, here], past_key_values=cache, use_cache=True, **inputs))
            start += count
        return torch.cat(parts, 1)

    assert_same(run(), expected)


@pytest.mark.parametrize("which", [0, 1], ids=["dynamic", "static"])
@pytest.mark.parametrize("steps", [[1, 1, 1], [3]], ids=str)
@pytest.mark.parametrize(("scheme", "kind"), gap_cells)
def test_decoding_a_right_padded_batch_is_right(scheme, kind, steps, which):
    """Padding stays in the cache, between a row's text and what is added to it."""
    model, short, long = patched_model(scheme, kind), 20, LENGTH + 9
    ids, new = tokens(2, long), tokens(2, sum(steps), seed=4)
    mask = torch.ones(2, long + sum(steps), dtype=torch.long)
    mask[0, short:long] = 0
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
    cache = caches(model, mask.shape[1])[which]
    rows = [torch.cat([ids[0, :short], new[0]]), torch.cat([ids[1], new[1]])]
    alone = [logits(model, row[None], use_cache=False)[0] for row in rows]

    def run():
        parts, start = [], 0
        for part in torch.cat([ids, new], 1).split([long, *steps], 1):
            here = slice(start, start + part.shape[1])
            inputs = dict(attention_mask=mask[:, : here.stop], position_ids=positions[:, here])
            parts.append(logits(model, part, past_key_values=cache, use_cache=True, **inputs))
            start = here.stop
        return torch.cat(parts, 1)[mask.bool()]

    assert_same(run(), torch.cat(alone))


# --- sliding windows ---

SLIDING = {
    "mistral": dict(sliding_window=16),
    "qwen2": dict(use_sliding_window=True, sliding_window=16, max_window_layers=1),
}


def sees_beyond(scheme, window):
    """Whether a window of the model's own hides what a scheme shows, and is not refused beside it."""
    does, positions = effect(scheme, "llama"), torch.arange(LONG)[None]
    apart = (positions[:, :, None] - positions[:, None, :]).abs()
    far = does.pattern is None or bool((does.pattern.visible(positions, positions) & (apart >= window)).any())
    return far and not does.forgets


@pytest.mark.parametrize("kind", SLIDING)
@pytest.mark.parametrize("scheme", [s for s in TEXT if sees_beyond(s, 16)])
def test_decoding_past_a_sliding_window_equals_a_full_pass(scheme, kind):
    model, ids = patched_model(scheme, kind, **SLIDING[kind]), tokens(2, LONG)
    full = logits(model, ids, use_cache=False)
    assert (full - logits(patched_model(scheme, kind), ids)).abs().max() > 0.1
    # Tokens one by one past the window and the trained length: after a prefill, and from the first on.
    for chunks in ([*[1] * 40, LONG - 40], [5, 20, 1, 1, 30, LONG - 57], [40, *[1] * 20, LONG - 60]):
        for cache in caches(model, LONG + 5):
            assert_same(in_chunks(model, ids, cache, chunks), full)


# --- caches that are cut, reused and handed on ---

DECODING = [("alibi", "llama"), ("t5", "gpt2"), ("dynamic_ntk", "qwen3"), ("rope", "gpt2"), ("yarn", "mistral")]
DECODING += [("rope", "bert_decoder"), ("sinusoidal", "llama")]


@pytest.mark.parametrize(("scheme", "kind"), DECODING)
def test_caches_can_be_cut_and_reused(scheme, kind):
    model, ids, other = patched_model(scheme, kind), tokens(1, LONG), tokens(1, LONG, seed=2)
    full = logits(model, ids, use_cache=False)
    cache = DynamicCache(config=model.config)
    in_chunks(model, torch.cat([ids[:, :30], other[:, :20]], 1), cache, [30, 19, 1])
    cache.crop(-20)
    assert_same(in_chunks(model, ids[:, 30:], cache, [1, 25, LONG - 56]), full[:, 30:])
    cache = StaticCache(config=model.config, max_cache_len=LONG)
    in_chunks(model, other[:, :50], cache, [49, 1])
    cache.reset()
    assert_same(in_chunks(model, ids, cache, [20, 1, LONG - 21]), full)


@pytest.mark.parametrize(("scheme", "kind"), DECODING)
def test_ways_to_generate_agree(scheme, kind):
    """A static cache, guessing ahead, prefill in chunks and a second turn give what plain greedy search gives."""
    model, prompt = patched_model(scheme, kind), tokens(1, 12).repeat(1, 2)
    settings = dict(min_new_tokens=24, max_new_tokens=24, do_sample=False)
    expected = model.generate(prompt, **settings)
    assert torch.equal(model.generate(prompt, cache_implementation="static", **settings), expected)
    assert torch.equal(model.generate(prompt, prefill_chunk_size=7, **settings), expected)
    assert torch.equal(model.generate(prompt, prompt_lookup_num_tokens=3, **settings), expected)
    short = dict(settings, min_new_tokens=10, max_new_tokens=10)
    first = model.generate(prompt, return_dict_in_generate=True, **short)
    rest = dict(settings, min_new_tokens=14, max_new_tokens=14)
    assert torch.equal(model.generate(first.sequences, past_key_values=first.past_key_values, **rest), expected)


# --- torch.compile ---


@pytest.fixture
def compiler():
    """A compiler without memory of other tests."""
    torch._dynamo.reset()
    yield torch.compile
    torch._dynamo.reset()


WHOLE_GRAPHS = [(scheme, kind) for scheme in ("alibi", "t5", "rope", "yarn") for kind in ("llama", "gpt2", "bert")]
OVER = LENGTH + 5
"""Past the trained length, by so little that schemes with stages have few: each of them is a graph."""


@pytest.mark.parametrize(("scheme", "kind"), WHOLE_GRAPHS)
def test_compiled_in_one_graph(scheme, kind, compiler):
    model, ids = patched_model(scheme, kind, num_hidden_layers=1), tokens(2, OVER)
    compiled = compiler(model, backend="eager", fullgraph=True)
    mask = torch.ones_like(ids)
    mask[0, -9:] = 0
    inputs = {"attention_mask": mask} | ({"use_cache": False} if kind in CAUSAL else {})
    assert_same(logits(compiled, ids, **inputs)[:, :-9], logits(model, ids, **inputs)[:, :-9], 1e-5)


IN_PIECES = [(scheme, kind) for scheme in ("none", "sinusoidal", "learned") for kind in ("llama", "gpt2")]
FOLLOWED = list(zip(FOLLOWING, ("llama", "gpt2"), strict=True))
"""Compiled in half a minute each, by one way of rotating: each of the two once, on each kind of model once."""


@pytest.mark.parametrize(
    ("scheme", "kind"), [*IN_PIECES, *(pytest.param(*cell, marks=pytest.mark.slow) for cell in FOLLOWED)]
)
def test_compiled_in_any_number_of_graphs(scheme, kind, compiler):
    model, ids = patched_model(scheme, kind, num_hidden_layers=1), tokens(2, OVER)
    assert_same(logits(compiler(model, backend="eager"), ids), logits(model, ids), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "kind"), [("alibi", "llama"), ("yarn", "llama"), ("rope", "gpt2")])
def test_compiled_by_inductor(scheme, kind, compiler):
    model, ids = patched_model(scheme, kind, num_hidden_layers=1), tokens(2, OVER)
    compiled = compiler(model, fullgraph=True)
    assert_same(logits(compiled, ids, use_cache=False), logits(model, ids, use_cache=False))


@pytest.mark.parametrize(
    ("scheme", "kind"), [("alibi", "llama"), ("t5", "llama"), ("dynamic_ntk", "llama"), ("rope", "gpt2")]
)
def test_compiled_decoding_with_a_static_cache_compiles_once(scheme, kind, compiler):
    model, ids, start = patched_model(scheme, kind), tokens(1, LONG), 20
    full = logits(model, ids, use_cache=False)
    cache = StaticCache(config=model.config, max_cache_len=LONG)
    logits(model, ids[:, :start], past_key_values=cache, use_cache=True)
    compiled = compiler(model, backend="eager", fullgraph=True)
    for i in range(start, LONG):
        inputs = dict(past_key_values=cache, use_cache=True, position_ids=torch.tensor([[i]]))
        with torch._dynamo.config.patch(error_on_recompile=i >= start + 2):
            assert_same(logits(compiled, ids[:, i : i + 1], **inputs), full[:, i : i + 1])


# --- what else is done with models ---


@pytest.mark.parametrize("scheme", ["alibi", "t5", "dynamic_ntk"])
def test_a_model_built_from_a_sealed_config_does_not_run_without_positions(scheme):
    with pytest.raises(PosencError, match="not patched"):
        logits(transformers.GPT2LMHeadModel(copy.deepcopy(patched_model(scheme, "gpt2").config)), tokens(1, 8))
    with pytest.raises(KeyError, match="hf_posenc"):  # transformers does not know this kind of RoPE
        transformers.LlamaForCausalLM(copy.deepcopy(patched_model(scheme, "llama").config))


@pytest.mark.parametrize("which", [0, 1], ids=["dynamic", "static"])
@pytest.mark.parametrize("scheme", NEEDS_KEY_POSITIONS)
def test_a_cache_without_positions_runs_up_to_the_text(scheme, which):
    """Somebody else may have filled it: its tokens are taken to stand without a gap before those of the call."""
    model, ids = patched_model(scheme, "llama"), tokens(2, LENGTH + 9)
    filled, cache = DynamicCache(config=model.config), caches(model, ids.shape[1])[which]
    logits(model, ids[:, :-4], past_key_values=filled, use_cache=True)
    for i, layer in enumerate(filled.layers):
        cache.update(layer.keys, layer.values, i)
    rest = logits(model, ids[:, -4:], past_key_values=cache, use_cache=True)
    assert_same(rest, logits(model, ids, use_cache=False)[:, -4:])


@pytest.mark.parametrize("scheme", ["sinusoidal", "learned"])
def test_schemes_that_need_no_key_positions_note_none(scheme):
    model = patched_model(scheme, "llama")
    cache = DynamicCache(config=model.config)
    logits(model, tokens(1, 8), past_key_values=cache, use_cache=True)
    assert {type(layer) for layer in cache.layers} == {DynamicLayer}
