"""Models whose attention layers are not told where their tokens stand: by the mask, or by their position table."""

import pytest
import torch
import transformers
from cells import LENGTH, tokens
from sweep.shrink import tiny_model
from transformers import DynamicCache, EncoderDecoderCache

from hf_posenc import patch_model

OPTIONS = {
    "fire": {"threshold": 20},
    "dynamic_ntk": {},
    "longrope": {"factor": 4.0},
    "sparse": {"window": 4, "global_tokens": 2},
}


def t5(kind):
    sizes = dict(vocab_size=97, d_model=32, d_kv=8, num_heads=4, d_ff=64, num_layers=2, num_decoder_layers=2)
    dense = dict(num_sparse_encoder_layers=0, num_sparse_decoder_layers=0) if kind.startswith("switch") else {}
    config = transformers.AutoConfig.for_model(kind, n_positions=LENGTH, **sizes, **dense)
    torch.manual_seed(0)
    model = transformers.AutoModelForSeq2SeqLM.from_config(config).eval()
    for name, weight in model.named_parameters():
        if weight.ndim > 1:
            weight.data.normal_(0, 0.1 if name.endswith(("q.weight", "lm_head.weight")) else 0.3)
    return model


def padded_batch(rows):
    width = max(map(len, rows))
    ids, mask = torch.zeros(2, len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, width - len(row) :], mask[i, width - len(row) :] = row, 1
    return ids, mask


def assert_each_row_alone(model, rows, read, ends):
    """A decoder makes the same of padded rows, whole and in chunks that end there, as of each by itself."""
    ids, mask = padded_batch(rows)
    past, start, parts = EncoderDecoderCache(DynamicCache(), DynamicCache()), 0, []
    with torch.no_grad():
        for end in (*ends, ids.shape[1]):
            new = dict(decoder_input_ids=ids[:, start:end], decoder_attention_mask=mask[:, :end])
            parts.append(model(read, past_key_values=past, **new).logits)
            start = end
        whole = model(read, decoder_input_ids=ids, decoder_attention_mask=mask).logits
        for i, row in enumerate(rows):
            alone = model(read[i : i + 1], decoder_input_ids=row[None]).logits[0]
            for found in (whole, torch.cat(parts, 1)):
                torch.testing.assert_close(found[i, -len(row) :], alone, atol=2e-3, rtol=0)


@pytest.mark.parametrize("scheme", ["dynamic_ntk", "longrope"])
@pytest.mark.parametrize("kind", ["t5", "mt5", "umt5", "switch_transformers"])
def test_decoders_without_position_ids_do_not_count_padding(kind, scheme):
    """The stage that a row is in is that of its text, however many tokens of padding stand before it."""
    model = patch_model(t5(kind), scheme, **OPTIONS[scheme])
    rows, read = [tokens(1, n, seed=n)[0] for n in (LENGTH - 2, LENGTH + 14)], tokens(2, 9, seed=3)
    assert_each_row_alone(model, rows, read, (5, 30, 38, 39, 40, 41))


def bart(kind):
    sizes = dict(encoder_ffn_dim=64, decoder_ffn_dim=64, encoder_attention_heads=4, decoder_attention_heads=4)
    sizes |= dict(d_model=32, encoder_layers=2, decoder_layers=2, max_position_embeddings=LENGTH, init_std=0.3)
    config = transformers.AutoConfig.for_model(kind, vocab_size=97, pad_token_id=0, **sizes)
    torch.manual_seed(0)
    return transformers.AutoModelForSeq2SeqLM.from_config(config).eval()


@pytest.mark.parametrize("scheme", ["dynamic_ntk", "longrope", "fire"])
@pytest.mark.parametrize("kind", ["bart", "mbart", "pegasus", "blenderbot"])
def test_what_a_decoder_counts_for_its_table_is_not_where_a_text_stands(kind, scheme):
    """These models ask their table for places counted from the padding on, and no argument tells them otherwise."""
    model = patch_model(bart(kind), scheme, **OPTIONS[scheme])
    for name, weight in model.named_parameters():
        if "posenc_bias" in name:
            weight.data.normal_(0, 1, generator=torch.Generator().manual_seed(1))
    rows, read = [tokens(1, n, seed=n)[0] for n in (LENGTH - 12, LENGTH + 14)], tokens(2, 9, seed=3)
    assert_each_row_alone(model, rows, read, (30, 38, 39))


@pytest.mark.parametrize("positions", ["padded", "jumping"])
@pytest.mark.parametrize("scheme", ["dynamic_ntk", "sparse"])
def test_compiled_layers_know_what_the_table_was_asked_for(scheme, positions):
    torch._dynamo.reset()
    model = patch_model(tiny_model("gpt_bigcode"), scheme, **OPTIONS[scheme])
    rows = [tokens(1, n, seed=n)[0] for n in ((20, 28) if scheme == "sparse" else (LENGTH + 2, LENGTH + 9))]
    ids, mask = padded_batch(rows)
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    if positions == "jumping":
        ids, mask = ids[1:], None
        places = torch.where(places > 9, places + 3 if scheme == "sparse" else places + 20, places)[1:]
    inputs = dict(attention_mask=mask, position_ids=places, use_cache=False)
    with torch.no_grad():
        meant = model(ids, **inputs).logits
        found = torch.compile(model, backend="eager")(ids, **inputs).logits
        torch.testing.assert_close(found[:, 8:], meant[:, 8:], atol=2e-4, rtol=0)
        if positions == "padded":
            for row, got in zip(rows, found, strict=True):
                alone = model(row[None], use_cache=False).logits[0]
                torch.testing.assert_close(got[-len(row) :], alone, atol=2e-4, rtol=0)
        else:
            counted = model(ids, use_cache=False).logits
            assert (counted - found).abs().max() > 0.05
