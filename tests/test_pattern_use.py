"""Patterns of keys in use: other families, far streams, borders, conversations, gradients, compiled and in bf16."""

import copy
import itertools
import math
import sys

import pytest
import torch
import transformers
from cells import LENGTH, tiny, tokens
from forked import peak_of, result_of
from peft import LoraConfig, get_peft_model
from sweep.shrink import tiny_model
from test_patterns import dca, lm_infinite, logits, logits_over_cache, rerope, self_extend, streaming, window
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, StaticCache
from transformers.masking_utils import eager_mask

from hf_posenc import PosencError, check_model, load, patch_model, save

TOL = 2e-4
N = 70
"""More than twice the trained length."""
NAMES = itertools.count()
OPTIONS = {
    "self_extend": dict(factor=4.0, window=5, group=7),
    "rerope": dict(target_length=96, window=10, slope=6.0),
    "dca": dict(chunk=11, local_window=5),
    "streaming": dict(sinks=2, window=9),
    "lm_infinite": dict(global_tokens=3, window=10),
    "window": dict(window=7),
    "sparse": dict(window=4, global_tokens=1, stride=5),
}
RULES = {
    "self_extend": lambda i, j: self_extend(i, j, 5, 7),
    "rerope": lambda i, j: rerope(i, j, 10, 6.0),
    "dca": lambda i, j: dca(i, j, 11, 16),
    "streaming": lambda i, j: streaming(i, j, 2, 9),
    "lm_infinite": lambda i, j: lm_infinite(i, j, 3, 10),
    "window": lambda i, j: window(i, j, 7),
}
GREEDY = dict(do_sample=False, min_new_tokens=12, max_new_tokens=12)


def patched_model(scheme, kind="llama", **overrides):
    return patch_model(tiny(kind, **overrides), scheme, **OPTIONS[scheme])


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, atol=TOL, rtol=TOL)


def as_pairs(x, layout, size):
    """The rotated channels as complex numbers, and the others."""
    start = x.shape[-1] - size if layout.endswith("last") else 0
    part, rest = (
        x[..., start : start + size].double(),
        torch.cat((x[..., :start], x[..., start + size :]), -1).double(),
    )
    first, second = part.chunk(2, -1) if layout.startswith("halves") else (part[..., 0::2], part[..., 1::2])
    return torch.complex(first, second), rest


def causal(rule):
    return lambda i, j: rule(i, j) if j <= i else None


def distances(rule, length):
    told = [[rule(i, j) for j in range(length)] for i in range(length)]
    return torch.tensor([[math.nan if d is None else d for d in row] for row in told], dtype=torch.float64)


def dense(model, rule, length, layout="halves", others=None):
    """A copy of an unpatched model that follows the rule: distance of query i and key j, None if it is not seen.

    Its own rotation is taken out of the angles that it hands to its layers. `others`: layers with a rule of their own.
    """
    twin = copy.deepcopy(model)
    rotary = twin.base_model.rotary_emb
    rotary.register_forward_hook(lambda module, args, out: (torch.ones_like(out[0]), torch.zeros_like(out[1])))
    tables = {layer: distances(other, length) for layer, other in (others or {}).items()}
    table = distances(rule, length)

    def attention(module, query, key, value, attention_mask, scaling, **kwargs):
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1).double()
        kinds = getattr(twin.config, "layer_types", None)
        name = f"{kinds[module.layer_idx]}_inv_freq" if kinds else "inv_freq"
        inv_freq = (getattr(rotary, name) if hasattr(rotary, name) else rotary.inv_freq).double()
        told = tables.get(module.layer_idx, table)
        (q, q_rest), (k, k_rest) = (as_pairs(x, layout, 2 * len(inv_freq)) for x in (query, key))
        turn = torch.exp(1j * told.nan_to_num()[..., None] * inv_freq)
        scores = torch.einsum("bhip,bhjp,ijp->bhij", q, k.conj(), turn).real + q_rest @ k_rest.transpose(2, 3)
        seen = ~told.isnan()
        scores = (scores * scaling).masked_fill(~seen, -torch.inf)
        if attention_mask is not None:
            scores = scores + attention_mask[..., :length].double()
        return (scores.softmax(-1) @ value).transpose(1, 2).to(query.dtype), None

    twin.config._attn_implementation = f"dense_pattern_{next(NAMES)}"
    AttentionInterface.register(twin.config._attn_implementation, attention)
    AttentionMaskInterface.register(twin.config._attn_implementation, eager_mask)
    return twin


FAMILIES = {
    "glm": dict(layout="neighbours"),
    "gpt_neox": {},
    "deepseek_v3": dict(layout="halves_last"),  # it sorts its pairs into halves on the way to attention
    "gemma3_text": dict(others={0: lambda i, j: i - j}),  # which slides, and is left alone
    "smollm3": dict(others={1: lambda i, j: 0 if j <= i else None}),  # which has no positions
}
CELLS = {*itertools.product(FAMILIES, RULES.keys() - {"window"})}
CELLS -= {("gemma3_text", "streaming"), ("smollm3", "streaming")}  # refused: layers of several kinds


@pytest.mark.parametrize("kind, scheme", sorted(CELLS))
def test_families_against_the_definition(kind, scheme):
    model, ids = tiny_model(kind), tokens(2, N)
    meant = logits(dense(model, causal(RULES[scheme]), N, **FAMILIES[kind]), ids)
    patch_model(model, scheme, **OPTIONS[scheme])
    check_model(model)
    assert_same(logits(model, ids), meant)
    assert_same(logits_over_cache(model, ids, (30, 31, 50, *range(51, N + 1)))[0], meant)


def test_rerope_on_an_encoder():
    """What is right of a query is as far away as on the left, the other way round."""
    model, ids, rule = tiny_model("modernbert"), tokens(2, N), RULES["rerope"]
    both = lambda i, j: rule(i, j) if j <= i else -rule(j, i)  # noqa: E731
    meant = logits(dense(model, both, N, others={1: lambda i, j: i - j}), ids)
    patch_model(model, "rerope", **OPTIONS["rerope"])
    assert_same(logits(model, ids), meant)


def explicit(scheme, length, symmetric=False):
    """What is seen, as a mask to add."""
    i, j = torch.arange(length)[:, None], torch.arange(length)
    seen = (i - j).abs() < OPTIONS[scheme]["window"]
    if scheme == "sparse":
        seen = seen | (i < 1) | (j < 1) | ((i - j) % 5 == 0)
    hidden = ~seen if symmetric else ~seen | (j > i)
    return torch.zeros(2, 1, length, length).masked_fill(hidden, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("scheme", ["window", "sparse"])
@pytest.mark.parametrize("kind", ["gpt_neox", "deepseek_v3", "smollm3", "opt", "roberta"])
def test_what_is_seen_equals_an_explicit_mask(kind, scheme):
    model, ids = tiny_model(kind), tokens(2, 28)
    places = {"position_ids": torch.arange(28)[None]} if kind == "opt" else {}  # which else counts in the mask
    meant = logits(model, ids, attention_mask=explicit(scheme, 28, kind == "roberta"), **places)
    patch_model(model, scheme, **OPTIONS[scheme])
    assert_same(logits(model, ids), meant)


def test_a_soft_cap_leaves_unseen_keys_unseen():
    """Gemma 2 squeezes scores into (-cap, cap): what is not seen must not come out of that as -cap."""
    model, ids = tiny_model("gemma2"), tokens(2, 15)
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = 2.0
    meant = logits(model, ids, attention_mask=explicit("window", 15))
    assert_same(logits(patch_model(model, "window", window=7), ids), meant)


@pytest.mark.parametrize("scheme", RULES)
def test_lengths_around_every_border(scheme):
    """A causal model's first logits do not know what follows: one reference serves all lengths."""
    model, ids = tiny("llama"), tokens(1, 46)
    meant = logits(dense(model, causal(RULES[scheme]), 46), ids)
    patch_model(model, scheme, **OPTIONS[scheme])
    for length in (1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 16, 17, 20, 21, 22, 23, 32, 33, 44, 45):
        assert_same(logits(model, ids[:, :length]), meant[:, :length])


def test_streaming_after_hundreds_of_tokens():
    model, ids = tiny("llama"), tokens(1, 500)
    meant = logits(dense(model, causal(lambda i, j: streaming(i, j, 4, 20)), 500), ids)
    patch_model(model, "streaming", sinks=4, window=20)
    found, past = logits_over_cache(model, ids, (3, 4, 5, 200, 201, *range(203, 501, 3)))
    assert_same(found[:, -100:], meant[:, -100:])
    assert past.layers[-1].keys.shape[2] == 23 and past.get_seq_length() == 500


@pytest.mark.parametrize("scheme", ["streaming", "rerope", "dca"])
def test_generation_from_padded_rows_is_greedy_under_the_definition(scheme):
    """Rows of 9 and 30 tokens, 90 more each: every token is the best one after those before it."""
    model, ids, total = tiny("llama"), tokens(2, 30), 120
    mask = torch.ones_like(ids)
    mask[0, :21] = 0
    twins = [dense(model, causal(RULES[scheme]), total - pads) for pads in (21, 0)]
    patch_model(model, scheme, **OPTIONS[scheme])
    out = model.generate(ids, attention_mask=mask, do_sample=False, min_new_tokens=90, max_new_tokens=90)
    for row, pads, twin in zip(out, (21, 0), twins, strict=True):
        real = row[None, pads:]
        best = logits(twin, real)[0, 29 - pads : -1]
        best[:, 2] = -torch.inf  # min_new_tokens forbids the end
        chosen = best.gather(1, real[0, 30 - pads :, None])[:, 0]
        assert (best.amax(-1) - chosen).max() < TOL


@pytest.mark.parametrize("scheme", ["streaming", "rerope"])
@pytest.mark.parametrize("pads", [(30, 40), (40, 57)], ids=["after the first turn", "before the second"])
def test_a_conversation_of_two_rows(scheme, pads):
    """Turns of unequal length, filled up inside the text: neither seen nor counted."""
    model, ids = patched_model(scheme), tokens(2, N)
    mask = torch.ones_like(ids)
    mask[0, slice(*pads)] = 0
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    past, parts = DynamicCache(config=model.config), []
    for turn in (slice(0, 40), slice(40, 60), *(slice(i, i + 1) for i in range(60, N))):
        inputs = dict(attention_mask=mask[:, : turn.stop], position_ids=places[:, turn])
        parts.append(logits(model, ids[:, turn], past_key_values=past, **inputs))
    real = mask[0].bool()
    assert_same(torch.cat(parts, 1)[0, real], logits(model, ids[:1, real])[0])
    assert_same(torch.cat(parts, 1)[1], logits(model, ids[1:])[0])


@pytest.mark.parametrize("scheme", ["streaming", "dca"])
def test_a_padded_batch_token_by_token(scheme):
    model, ids = patched_model(scheme), tokens(2, 40)
    mask = torch.ones_like(ids)
    mask[0, :12] = 0
    places, past, parts = (mask.cumsum(-1) - 1).clamp(min=0), DynamicCache(config=model.config), []
    for i in range(40):
        inputs = dict(attention_mask=mask[:, : i + 1], position_ids=places[:, i : i + 1])
        parts.append(logits(model, ids[:, i : i + 1], past_key_values=past, **inputs))
    assert_same(torch.cat(parts, 1)[0, 12:], logits(model, ids[:1, 12:])[0])


@pytest.mark.parametrize("family, scheme", [("bert", "window"), ("modernbert", "rerope")])
def test_sharpened_encoders_do_not_count_padding(family, scheme):
    model, ids = tiny_model(family), tokens(2, 30)
    patch_model(model, scheme, window=5, logit_scaling=True, trained_length=8)
    mask = torch.ones_like(ids)
    mask[0, 12:] = 0
    assert_same(logits(model, ids, attention_mask=mask)[0, :12], logits(model, ids[:1, :12])[0])


@pytest.mark.parametrize("scheme", OPTIONS)
def test_ways_to_generate_agree(scheme):
    model, ids = patched_model(scheme), tokens(2, 40)
    mask = torch.ones_like(ids)
    mask[0, :15] = 0
    beams = dict(GREEDY, attention_mask=mask, num_beams=3, num_return_sequences=2)
    assert torch.equal(model.generate(ids, **beams), model.generate(ids, use_cache=False, **beams))
    alone = model.generate(ids, **GREEDY)
    assert torch.equal(model.generate(ids, prefill_chunk_size=16, **GREEDY), alone)
    assert torch.equal(model.generate(ids, **GREEDY), alone)  # nothing is left over from the calls before
    first = model.generate(ids, return_dict_in_generate=True, **GREEDY)
    text = torch.cat([first.sequences, tokens(2, 9, seed=5)], 1)
    again = model.generate(text, past_key_values=first.past_key_values, **GREEDY)
    assert torch.equal(again, model.generate(text, **GREEDY))


@pytest.mark.parametrize("scheme", OPTIONS)
def test_caches_that_are_emptied_or_cut(scheme):
    model, ids = patched_model(scheme), tokens(2, 50)
    meant, past = logits(model, ids), DynamicCache(config=model.config)
    if scheme != "streaming":
        logits(model, ids[:, :45], past_key_values=past)
        past.crop(-15)
        assert_same(logits(model, ids[:, 30:], past_key_values=past), meant[:, 30:])
        past = StaticCache(config=model.config, max_cache_len=64)
    logits(model, ids.flip(1), past_key_values=past)
    past.reset()
    assert_same(logits(model, ids[:, :33], past_key_values=past), meant[:, :33])
    assert_same(logits(model, ids[:, 33:], past_key_values=past), meant[:, 33:])


@pytest.mark.parametrize("kind", ["gemma3_text", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("scheme", ["rerope", "window"])
@pytest.mark.filterwarnings("ignore:This model's RoPE is scaled already")
def test_static_caches_of_models_with_sliding_layers(kind, scheme):
    """Positions must be kept for as many slots as the longest layer has, not the first one."""
    model, ids = patch_model(tiny_model(kind), scheme, **OPTIONS[scheme]), tokens(2, 40)
    past, meant = StaticCache(config=model.config, max_cache_len=48), logits(model, ids)
    parts = [
        logits(model, part, past_key_values=past) for part in ids.split((20, 1, 1, 10, 1, 1, 1, 1, 1, 1, 1, 1), 1)
    ]
    assert_same(torch.cat(parts, 1), meant)


@pytest.mark.parametrize("scheme", ["streaming", "rerope"])
def test_rows_may_leave_a_cache(scheme):
    model, ids = patched_model(scheme), tokens(2, 50)
    past = DynamicCache(config=model.config)
    logits(model, ids[:, :40], past_key_values=past)
    past.batch_select_indices(torch.tensor([1]))
    assert_same(logits(model, ids[1:, 40:], past_key_values=past), logits(model, ids[1:])[:, 40:])


@pytest.mark.parametrize("scheme", ["dca", "lm_infinite", "window"])
def test_attention_weights_of_a_decoding_step(scheme):
    """One per key, as in the last row of a full pass."""
    model, ids = patched_model(scheme), tokens(2, 41)
    model.set_attn_implementation("hf_posenc_eager")
    with torch.no_grad():
        full = model(ids, output_attentions=True).attentions
        past = model(ids[:, :40], use_cache=True).past_key_values
        step = model(ids[:, 40:], past_key_values=past, output_attentions=True).attentions
    for whole, last in zip(full, step, strict=True):
        assert_same(whole.sum(-1), torch.ones_like(whole[..., 0]))
        assert_same(last, whole[:, :, -1:])


# --- training, precision, compilation, memory ---


@pytest.mark.parametrize("scheme", ["self_extend", "dca", "streaming"])
def test_gradients_against_the_definition(scheme):
    """Over more than one block of queries."""
    model, ids = tiny("llama", num_hidden_layers=1), tokens(1, 300)
    twin = dense(model, causal(RULES[scheme]), 300)
    twin(ids, labels=ids).loss.backward()
    patch_model(model, scheme, **OPTIONS[scheme]).train()
    for _ in range(2):
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        for meant, found in zip(twin.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(found.grad, meant.grad, atol=1e-5, rtol=1e-3)
        model.gradient_checkpointing_enable()


@pytest.mark.parametrize("scheme", OPTIONS)
def test_bf16_costs_no_more_than_on_the_plain_model(scheme):
    model, ids = tiny("llama"), tokens(2, 200)
    plain = (logits(copy.deepcopy(model).bfloat16(), ids[:, :LENGTH]) - logits(model, ids[:, :LENGTH])).abs().mean()
    patch_model(model, scheme, **OPTIONS[scheme])
    meant = logits(model, ids)
    model.bfloat16()
    assert model.model.posenc.inv_freq.dtype == torch.float32
    for found in (logits(model, ids), logits_over_cache(model, ids, (150, *range(151, 201)))[0]):
        assert (found - meant).abs().mean() < 2 * plain


COMPILED = {**OPTIONS, "sparse": dict(window=4, global_tokens=2), "dynamic_ntk": {}}


@pytest.mark.parametrize("scheme", sorted(COMPILED.keys() - {"streaming"}))
def test_compiled_decoding_in_one_graph(scheme):
    """Rows with padding in front, of several texts, past the end of a stage, and once more from the start."""
    torch._dynamo.reset()
    model = patch_model(tiny("llama", num_hidden_layers=1), scheme, **COMPILED[scheme])
    ids, gaps, start, end = tokens(2, 50), torch.tensor([[0], [7]]), 30, 42
    mask = (torch.arange(50) >= gaps).long()
    places = (torch.arange(50) - gaps).clamp(min=0)
    meant = logits(model, ids, attention_mask=mask, position_ids=places, use_cache=False)
    past = StaticCache(config=model.config, max_cache_len=50)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for turn in range(2):
        past.reset()
        told = dict(attention_mask=mask[:, :start], position_ids=places[:, :start])
        logits(model, ids[:, :start], past_key_values=past, **told)
        for i in range(start, end):
            told = dict(attention_mask=mask[:, : i + 1], position_ids=places[:, i : i + 1])
            with torch._dynamo.config.patch(error_on_recompile=turn == 1 or i >= start + 2):
                assert_same(logits(compiled, ids[:, i : i + 1], past_key_values=past, **told), meant[:, i : i + 1])


def test_a_compiled_prefill_in_one_graph():
    torch._dynamo.reset()
    model, ids = patched_model("window", num_hidden_layers=1), tokens(2, 50)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_same(logits(compiled, ids, use_cache=True), logits(model, ids))


@torch.no_grad()
def memory_of_a_prefill():
    sizes = dict(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=97, max_position_embeddings=512, **sizes)
    )
    patch_model(model.eval(), "rerope")
    ids = torch.randint(3, 97, (1, 8192))
    mask = torch.ones_like(ids)
    mask[:, :7] = 0
    model.model(ids[:, :600], attention_mask=mask[:, :600])
    return peak_of(lambda: model.model(ids, attention_mask=mask, use_cache=False))


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's own account of memory")
def test_memory_of_a_padded_prefill():
    """Scores of 4 heads and 8192 tokens are 1.1 GB; those of a block 34 MB, and a mask of transformers 67 MB."""
    assert result_of(memory_of_a_prefill) < 500


@pytest.mark.parametrize("scheme", OPTIONS)
def test_adapters_carry_their_pattern(scheme, tmp_path):
    base, ids = tiny("llama"), tokens(2, N)
    base.save_pretrained(tmp_path / "base")
    model = patch_model(type(base).from_pretrained(tmp_path / "base").eval(), scheme, **OPTIONS[scheme])
    tuned = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)).eval()
    save(tuned, tmp_path / "adapter")
    assert_same(logits(load(tmp_path / "adapter"), ids), logits(tuned, ids))


@pytest.mark.parametrize("scheme", ["dca", "streaming"])
def test_one_graph_for_texts_of_any_length(scheme):
    torch._dynamo.reset()
    model = patched_model(scheme, num_hidden_layers=1)
    compiled = torch.compile(model, dynamic=True, backend="eager")
    for length in (20, 45, N):
        ids = tokens(2, length)
        assert_same(logits(compiled, ids, use_cache=False), logits(model, ids, use_cache=False))


@pytest.mark.parametrize("scheme", OPTIONS)
def test_continuous_batching_is_refused(scheme):
    """Paged kernels know nothing of patterns; the kernels that the refusal names would drop the positions."""
    model, ids = patched_model(scheme, num_hidden_layers=1), tokens(1, 9)
    with pytest.raises(ValueError, match="not supported for continuous batching"):
        model.generate_batch(inputs=ids.tolist(), max_new_tokens=1, progress_bar=False)
    for kernel in ("paged|eager", "sdpa"):
        model.set_attn_implementation(kernel)
        with pytest.raises(PosencError, match="would drop its positions"):
            logits(model, ids)
