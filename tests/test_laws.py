"""The laws that every scheme keeps on every family.

They compare a patched model with itself; that it also does what its scheme says is for other tests to show.
"""

import copy
import pickle

import pytest
import torch
from cells import (
    CAUSAL,
    CAUSAL_CELLS,
    CELLS,
    KINDS,
    LENGTH,
    REFUSED_CELLS,
    ROTARY,
    TABLES,
    VOCAB,
    effect,
    modules_of,
    no_dropout,
    options,
    projections,
    tiny,
    tokens,
    trained_parameters,
)
from comparisons import (
    LONG,
    anatomy,
    assert_same,
    assert_same_model,
    in_chunks,
    is_absolute,
    is_identity,
    logits,
    padded_batch,
    patched_model,
    plain_logits,
    resizes,
    where_they_stand,
)
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import DynamicCache, StaticCache
from transformers.pytorch_utils import Conv1D

from hf_posenc import SCHEMES, PosencError, UnsupportedCell, check_model, is_patched, patch_model, unpatch_model
from hf_posenc.core.precision import fp32_names
from hf_posenc.core.tables import LearnedTable

every_cell = pytest.mark.parametrize(("scheme", "kind"), CELLS)
every_causal_cell = pytest.mark.parametrize(("scheme", "kind"), CAUSAL_CELLS)


# --- what a patch changes, and what it does not ---


@every_cell
def test_output_changes_and_unpatching_restores_every_bit(scheme, kind):
    model, ids = tiny(kind), tokens(2, LENGTH)
    weights = dict(model.named_parameters())
    patch_model(model, scheme, **options(scheme))
    assert is_patched(model)
    check_model(model)
    error = (logits(model, ids) - plain_logits(kind)).abs().max()
    assert error == 0 if is_identity(scheme, kind) else error > 0.05
    assert torch.isfinite(logits(model, tokens(2, LONG))).all()
    unpatch_model(model)
    assert not is_patched(model)
    assert_same_model(model, tiny(kind))
    assert all(p is weights[name] for name, p in model.named_parameters())
    assert torch.equal(logits(model, ids), plain_logits(kind))
    check_model(model)


@pytest.mark.parametrize("kind", KINDS)
def test_no_two_schemes_are_alike_past_the_trained_length(kind):
    """A scheme whose mechanism is not in place is some other scheme, most often `none`."""
    ids = tokens(1, LONG)
    outputs = {scheme: logits(patched_model(scheme, kind), ids) for scheme in SCHEMES if (scheme, kind) in CELLS}
    names = list(outputs)
    for i, one in enumerate(names):
        for other in names[:i]:
            assert (outputs[one] - outputs[other]).abs().max() > 0.05, (one, other)


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("resize", ["cyclic", "hierarchical"])
def test_a_table_that_keeps_its_rows_changes_nothing_within_them(kind, resize):
    model = patch_model(tiny(kind), "learned", target_length=LONG, resize=resize)
    assert torch.equal(logits(model, tokens(2, LENGTH)), plain_logits(kind))


@every_cell
def test_patching_anew_equals_patching_once(scheme, kind):
    names = [name for name in SCHEMES if (name, kind) in CELLS]
    before = names[names.index(scheme) - 1]
    fresh, model = patched_model(scheme, kind), patched_model(before, kind)
    logits(model, tokens(1, LENGTH))
    patch_model(model, scheme, **options(scheme))
    assert_same_model(model, fresh)
    expected = logits(fresh, tokens(2, LONG))
    assert torch.equal(logits(model, tokens(2, LONG)), expected)
    patch_model(model, scheme, **options(scheme))
    assert_same_model(model, fresh)
    assert torch.equal(logits(model, tokens(2, LONG)), expected)
    assert_same_model(unpatch_model(model), tiny(kind))


@every_cell
def test_no_other_model_is_touched(scheme, kind):
    other = tiny(kind)
    untouched = anatomy(other)
    model = patched_model(scheme, kind)
    logits(model, tokens(1, LONG))
    assert anatomy(other) == untouched
    assert torch.equal(logits(other, tokens(2, LENGTH)), plain_logits(kind))
    assert torch.equal(logits(tiny(kind), tokens(2, LENGTH)), plain_logits(kind))


@every_cell
def test_copies_are_the_same_and_independent(scheme, kind):
    model, ids = patched_model(scheme, kind), tokens(2, LONG)
    expected = logits(model, ids)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        check_model(twin)
        assert torch.equal(logits(twin, ids), expected)
        assert_same_model(unpatch_model(twin), tiny(kind))
        assert torch.equal(logits(twin, tokens(2, LENGTH)), plain_logits(kind))
    check_model(model)
    assert torch.equal(logits(model, ids), expected)


@every_cell
def test_check_model_notices_tampering(scheme, kind):
    model, ids = patched_model(scheme, kind), tokens(2, LONG)
    check_model(model)
    expected = logits(model, ids)
    ours = model.config._attn_implementation
    if ours.startswith("hf_posenc_"):
        model.set_attn_implementation("sdpa")
        with pytest.raises(PosencError, match="sdpa"):
            model(ids)
        with pytest.raises(PosencError, match="sdpa"):
            check_model(model)
        model.set_attn_implementation(ours)
        check_model(model)
        assert torch.equal(logits(model, ids), expected)
    owner, _, name = TABLES.get(kind, "model.rotary_emb").rpartition(".")
    native = tiny(kind, max_position_embeddings=4 * LENGTH).get_submodule(f"{owner}.{name}")
    setattr(model.get_submodule(owner), name, native)
    with pytest.raises(PosencError):
        check_model(model)


@pytest.mark.parametrize(("scheme", "kind"), REFUSED_CELLS)
def test_what_makes_no_sense_is_refused_and_changes_nothing(scheme, kind):
    model = tiny(kind)
    with pytest.raises(UnsupportedCell):
        patch_model(model, scheme, **options(scheme))
    assert_same_model(model, tiny(kind))


# --- one pass, or piece by piece ---


@every_causal_cell
def test_cached_decoding_equals_a_full_pass(scheme, kind):
    model, ids = patched_model(scheme, kind), tokens(2, LONG)
    full = logits(model, ids, use_cache=False)
    assert_same(logits(model, ids, use_cache=True), full)
    assert_same(in_chunks(model, ids, DynamicCache(config=model.config), [1] * LONG), full)
    assert_same(in_chunks(model, ids, DynamicCache(config=model.config), [1, 5, 17, 30, 2, 41]), full)


def refuse_static(scheme, kind):
    if effect(scheme, kind).forgets:
        pytest.skip("keeps a cache of its own, and refuses others: see test_patterns.py")


@every_causal_cell
def test_decoding_with_a_static_cache_equals_a_full_pass(scheme, kind):
    refuse_static(scheme, kind)
    model, ids = patched_model(scheme, kind), tokens(2, LONG)
    full = logits(model, ids, use_cache=False)
    for chunks in ([LENGTH - 6] + [1] * (LONG - LENGTH + 6), [3, 25, 1, 40, 27]):
        cache = StaticCache(config=model.config, max_cache_len=LONG + 7)
        assert_same(in_chunks(model, ids, cache, chunks), full)


@every_causal_cell
def test_generation_past_the_trained_length(scheme, kind):
    """Greedy with a cache: each token is the likeliest one of a single pass over all of them."""
    model, prompt = patched_model(scheme, kind), tokens(2, 5)
    made = model.generate(prompt, min_new_tokens=LONG, max_new_tokens=LONG, do_sample=False)
    assert made.shape == (2, LONG + 5)
    likeliest = logits(model, made, use_cache=False)
    likeliest[..., 2] = -torch.inf  # min_new_tokens keeps the end of text away
    assert torch.equal(likeliest[:, 4:-1].argmax(-1), made[:, 5:])


@every_causal_cell
def test_generation_is_the_same_without_a_cache(scheme, kind):
    """Left-padded beams and greedy search that cross the trained length."""
    model, new = patched_model(scheme, kind), 12
    ids, mask, _ = padded_batch([tokens(1, LENGTH - 5)[0], tokens(1, 9)[0]], "left")
    for beams in (1, 3):
        settings = dict(attention_mask=mask, num_beams=beams, min_new_tokens=new, max_new_tokens=new, do_sample=False)
        cached = model.generate(ids, use_cache=True, **settings)
        assert torch.equal(cached, model.generate(ids, use_cache=False, **settings))


# --- alone, or in company ---

ROWS = [tokens(1, n, seed=n)[0] for n in (20, LENGTH + 5, LONG)]


@every_cell
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_row_does_not_see_padding_or_its_neighbours(scheme, kind, side):
    model = patched_model(scheme, kind)
    ids, mask, places = padded_batch(ROWS, side)
    batched = [logits(model, ids, attention_mask=mask, position_ids=where_they_stand(mask))]
    if side == "right" or (kind not in CAUSAL and not is_absolute(scheme, kind)):
        batched.append(logits(model, ids, attention_mask=mask))  # positions need not be given
    for output in batched:
        for row, place, got in zip(ROWS, places, output, strict=True):
            assert_same(got[place], logits(model, row[None])[0])


@every_causal_cell
@pytest.mark.parametrize("cache_class", [DynamicCache, StaticCache])
def test_decoding_a_left_padded_batch_equals_each_row_alone(scheme, kind, cache_class):
    if cache_class is StaticCache:
        refuse_static(scheme, kind)
    model, steps = patched_model(scheme, kind), 8
    rows = [tokens(1, n, seed=n)[0] for n in (7, LENGTH - 4, LENGTH + 15)]
    new = tokens(3, steps, seed=9)
    ids, mask, _ = padded_batch(rows, "left")
    width = ids.shape[1]
    mask = torch.cat([mask, torch.ones_like(new)], 1)
    positions, whole = where_they_stand(mask), torch.cat([ids, new], 1)
    alone = [logits(model, torch.cat(pair)[None])[0, -steps:] for pair in zip(rows, new, strict=True)]
    for prefill in ([width], [5, width - 5]):  # the first five are all padding in one row
        size = {"max_cache_len": width + steps + 3} if cache_class is StaticCache else {}
        cache = cache_class(config=model.config, **size)
        start, parts = 0, []
        for count in (*prefill, 1, 1, 3, 1, 1, 1):
            here = slice(start, start + count)
            inputs = dict(attention_mask=mask[:, : here.stop], position_ids=positions[:, here])
            parts.append(logits(model, whole[:, here], past_key_values=cache, use_cache=True, **inputs))
            start += count
        assert_same(torch.cat(parts, 1)[:, -steps:], torch.stack(alone))


# BERT as a decoder does not tell its mask about position_ids, so that packed documents would see each other.
@pytest.mark.parametrize(("scheme", "kind"), [cell for cell in CAUSAL_CELLS if cell[1] != "bert_decoder"])
def test_packed_documents_equal_each_alone(scheme, kind):
    model = patched_model(scheme, kind)
    batch = [[10, LENGTH + 8, 25], [LENGTH + 20, 3, 20]]
    ids = tokens(2, 75)
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in batch])
    packed = logits(model, ids, position_ids=positions, use_cache=False)
    for row, lengths, got in zip(ids, batch, packed, strict=True):
        alone = [logits(model, document[None], use_cache=False)[0] for document in row.split(lengths)]
        assert_same(got, torch.cat(alone))


# --- kernels and precision ---


@every_cell
def test_eager_equals_sdpa(scheme, kind):
    fused, eager = patched_model(scheme, kind), patched_model(scheme, kind, attn_implementation="eager")
    names = [model.config._attn_implementation for model in (fused, eager)]
    assert names in (["hf_posenc_sdpa", "hf_posenc_eager"], ["sdpa", "eager"])
    check_model(eager)
    ids, mask, places = padded_batch(ROWS, "left")
    inputs = dict(attention_mask=mask, position_ids=where_they_stand(mask))
    one, other = logits(fused, ids, **inputs), logits(eager, ids, **inputs)
    for place, a, b in zip(places, one, other, strict=True):
        assert_same(a[place], b[place])
    assert_same(logits(fused, ROWS[-1][None]), logits(eager, ROWS[-1][None]))


def fp32_tensors(model):
    """What positions are computed from: all that says so, and all that is known to be."""
    names, declared = ("inv_freq", "slopes", "weights", "posenc_frequencies"), fp32_names(model)
    tensors = [
        (name, tensor) for name, tensor in [*model.named_buffers(), *model.named_parameters()] if tensor.numel()
    ]
    known = [name for name, _ in tensors if name.rpartition(".")[2] in names and "original" not in name]
    return [tensor for name, tensor in tensors if name in declared or name in known]


def has_positions(scheme, kind):
    """Whether a scheme computes with numbers that rounding would spoil: frequencies, slopes."""
    brought = any(fp32_names(module) for module in modules_of(scheme, kind).values())
    return brought or kind in ROTARY or effect(scheme, kind).rotation is not None


@every_cell
def test_positions_stay_in_fp32_in_a_bf16_model(scheme, kind):
    after, before = patched_model(scheme, kind).to(torch.bfloat16), tiny(kind).to(torch.bfloat16)
    patch_model(before, scheme, **options(scheme))
    for model in (after, before):
        check_model(model)
        kept, fp32 = fp32_tensors(model), fp32_names(model)
        assert all(tensor.dtype == torch.float32 for tensor in kept)
        assert bool(kept) == has_positions(scheme, kind)
        weights = [*model.named_parameters(), *model.state_dict().items()]
        assert {t.dtype for name, t in weights if name not in fp32} == {torch.bfloat16}
        assert {t.dtype for name, t in weights if name in fp32} <= {torch.float32}
    ids = tokens(2, LONG)
    ours = logits(after, ids)
    assert ours.dtype == torch.bfloat16
    assert torch.isfinite(ours).all()
    if not resizes(scheme, kind):
        assert torch.equal(ours, logits(before, ids))
    # Back in fp32 the positions are those of a model that never was in bf16.
    exact = tiny(kind).to(torch.bfloat16).float()
    if kind in ROTARY:  # plain transformers does not keep its own frequencies
        exact.model.rotary_emb = tiny(kind).model.rotary_emb
    if not trained_parameters(scheme, kind) - fp32_names(after.base_model):
        patch_model(exact, scheme, **options(scheme))
        assert torch.equal(logits(after.float(), ids), logits(exact, ids))


@every_cell
def test_unpatching_follows_a_cast(scheme, kind):
    model = unpatch_model(patched_model(scheme, kind).to(torch.bfloat16))
    expected = tiny(kind).to(torch.bfloat16)
    assert_same_model(model, expected)
    mine, theirs = dict(model.named_buffers()), dict(expected.named_buffers())
    assert {name: b.dtype for name, b in mine.items()} == {name: b.dtype for name, b in theirs.items()}
    assert all(torch.equal(b, theirs[name]) for name, b in mine.items())
    ids = tokens(2, LENGTH)
    assert torch.equal(logits(model, ids), logits(expected, ids))
    assert torch.isfinite(logits(model, ids)).all()


# --- training ---


def trainable(scheme, kind):
    return patched_model(scheme, kind, **no_dropout(kind)).train()


def loss_and_gradients(model, ids):
    model.zero_grad()
    loss = model(ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@every_cell
def test_gradients_reach_every_parameter_with_and_without_checkpointing(scheme, kind):
    model, ids = trainable(scheme, kind), tokens(2, LONG)
    loss, gradients = loss_and_gradients(model, ids)
    assert set(gradients) == {name for name, _ in model.named_parameters()}
    assert all(torch.isfinite(gradient).all() for gradient in gradients.values())
    ours = [name for name in gradients if "posenc" in name or name.removesuffix(".weight") == TABLES.get(kind)]
    assert set(ours) == {f"{model.base_model_prefix}.{name}" for name in trained_parameters(scheme, kind)}
    assert all(gradients[name].abs().max() > 1e-6 for name in ours)
    model.gradient_checkpointing_enable()
    again, checkpointed = loss_and_gradients(model, ids)
    assert torch.equal(again, loss)
    assert set(checkpointed) == set(gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(checkpointed[name], gradient, atol=1e-6, rtol=1e-5)


def with_lora(model, kind, **settings):
    """Random adapters that do something, on all that makes q, k and v."""
    transposed = any(isinstance(module, Conv1D) for module in model.modules())
    settings |= dict(target_modules=projections(kind), fan_in_fan_out=transposed)
    config = LoraConfig(r=4, lora_alpha=8, **settings)
    adapted = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    return adapted.eval()


@every_cell
def test_lora_adapters_work_before_and_after_merging(scheme, kind):
    ids = tokens(2, LONG)
    base = patched_model(scheme, kind)
    without = logits(base, ids)
    adapted = with_lora(base, kind)
    _, gradients = loss_and_gradients(adapted, ids)
    assert gradients and all("lora_" in name and g.abs().max() > 0 for name, g in gradients.items())
    expected = logits(adapted, ids)
    assert (expected - without).abs().max() > 0.1
    if kind in CAUSAL:
        cache = DynamicCache(config=base.config)
        assert_same(in_chunks(adapted, ids, cache, [30, 1, 1, LONG - 32]), expected)
    merged = adapted.merge_and_unload()
    check_model(merged)
    assert_same(logits(merged, ids), expected)


TRAINED = [(scheme, kind) for scheme, kind in CELLS if trained_parameters(scheme, kind)]


@pytest.mark.parametrize(("scheme", "kind"), TRAINED)
def test_the_copy_that_peft_trains_is_the_one_in_use(scheme, kind):
    ids, names = tokens(2, LONG), trained_parameters(scheme, kind)
    modules = sorted({place.rpartition(".")[2] for place in modules_of(scheme, kind)})
    adapted = with_lora(patched_model(scheme, kind), kind, modules_to_save=modules)
    before = logits(adapted, ids)
    _, gradients = loss_and_gradients(adapted, ids)
    mine = [name for name in gradients if ".modules_to_save." in name]
    assert len(mine) == len(names)
    for name in mine:
        assert gradients[name].abs().max() > 0
        adapted.get_parameter(name).data += torch.randn(gradients[name].shape)
    after = logits(adapted, ids)
    assert (after - before).abs().max() > 0.1
    merged = adapted.merge_and_unload()
    check_model(merged)
    assert_same(logits(merged, ids), after)


@pytest.mark.parametrize("kind", KINDS)
def test_a_learned_table_says_where_it_ends(kind):
    model = patched_model("learned", kind)
    assert any(isinstance(m, LearnedTable) for m in model.modules() if isinstance(m, nn.Embedding))
    with pytest.raises(PosencError, match=str(4 * LENGTH)):
        model(torch.full((1, 4 * LENGTH + 1), VOCAB - 1))
