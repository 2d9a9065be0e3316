"""Passages behind a gap in the positions: what stands there, flat where it must be, climbing where it is known to."""

from pydoc_data.topics import topics

import pytest
import torch
import torch.nn.functional as F
from cells import CAUSAL_CELLS, LENGTH, options, tiny, tokens
from evaluated import STORY, bytes_tokenizer, document, reader
from transformers import AutoTokenizer

from hf_posenc import PosencError, load, patch_model
from hf_posenc.evaluation import Options, Reading, evaluate, shift, standings, tokenized
from hf_posenc.evaluation.measures.shift import cut_passages, shift_losses
from hf_posenc.models import model_path

FEW = Reading(windows=4, scored=15)


def losses(rows):
    return {row.length: row.value for row in rows if row.metric == "loss"}


@torch.no_grad()
def hidden(model, before, passages, end):
    """One pass over everything up to `end`, in which no passage sees the filler between: what the gap stands for."""
    gap = end - before.shape[1] - passages.shape[1]
    ids = torch.cat([before, torch.full((len(before), gap), 7), passages], 1)
    seen = torch.ones(end, end, dtype=torch.bool).tril()
    seen[end - passages.shape[1] :, before.shape[1] : before.shape[1] + gap] = False
    mask = torch.zeros(end, end, dtype=model.dtype).masked_fill(~seen, torch.finfo(model.dtype).min)
    logits = model(ids, attention_mask=mask[None, None].expand(len(ids), 1, -1, -1)).logits
    found = logits[:, -passages.shape[1] : -1].float()
    return F.cross_entropy(found.mT, passages[:, 1:], reduction="none").mean(-1)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3"])
def test_a_gap_is_text_that_is_not_seen(kind):
    model, before, passages = tiny(kind), tokens(2, 6), tokens(2, 8)
    for end in (14, 20, LENGTH):
        torch.testing.assert_close(shift_losses(model, before, passages, end), hidden(model, before, passages, end))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_without_positions_it_is_flat_to_the_bit(kind):
    model = patch_model(tiny(kind), "none")
    rows = shift(model, [document(400)], (LENGTH, 3 * LENGTH, 1000, 100_000), reading=FEW)
    assert len({row.value for row in rows if row.metric == "loss"}) == 1
    assert [row.value for row in rows if row.metric == "climb"] == [0.0] * 3


def test_alibi_forgets_what_is_far_and_is_flat_from_there_on():
    model, text = patch_model(tiny("llama"), "alibi"), [document(400)]
    found = losses(shift(model, text, (LENGTH, 30_000, 60_000, 120_000), reading=FEW))
    assert found[30_000] == found[60_000] == found[120_000] != found[LENGTH]
    _, passages = cut_passages(text, LENGTH, FEW, None)
    with torch.no_grad():
        alone = model(passages).logits[:, :-1].float()  # as if nothing had been before
    assert found[120_000] == pytest.approx(float(F.cross_entropy(alone.mT, passages[:, 1:])), abs=1e-4)


def test_an_unpatched_llama_climbs_past_its_length_and_yarn_does_not():
    path = model_path("tiny")  # trained at 256
    tokenizer, model = AutoTokenizer.from_pretrained(path), load(path)
    text = tokenized({name: topics[name] for name in ("import", "for", "class", "try", "global", "with")}, tokenizer)

    def climb():
        rows = shift(model, text, (208, 512), reading=Reading(windows=6))
        (row,) = (row for row in rows if row.metric == "climb")
        return row

    lost = climb()
    patch_model(model, "yarn", target_length=1024)
    assert lost.value > 3 * lost.stderr > 0 and climb().value < lost.value / 3


@pytest.mark.parametrize("scheme, kind", [cell for cell in CAUSAL_CELLS if cell[1] == "llama"])
def test_every_scheme_can_be_shifted(scheme, kind):
    model = patch_model(tiny(kind), scheme, **options(scheme))
    ends = (LENGTH, 2 * LENGTH)
    rows = shift(model, [document(200)], ends, reading=Reading(windows=2, scored=15))
    assert set(losses(rows)) == set(ends)


def test_a_run_keeps_it_out_of_the_ranking_and_within_what_there_is():
    text = tokenized({"story": STORY}, bytes_tokenizer())
    asked = Options(lengths=(64, 512), tasks=("shift",), reading=Reading(windows=2, scored=15))
    rows = evaluate(reader("gpt2"), bytes_tokenizer(), text, options=Options(**{**vars(asked), "lengths": (16 + 16,)}))
    assert [(row.metric, row.length, row.n) for row in rows] == [("loss", 32, 2)]
    rows = evaluate(reader(), bytes_tokenizer(), text, options=asked)
    assert [(row.metric, row.length) for row in rows] == [("loss", 64), ("loss", 512), ("climb", 512)]
    assert standings(rows) == []


def test_what_cannot_be_shifted_is_refused():
    text = [document(400)]
    with pytest.raises(PosencError, match="take lengths from 32 up"):
        shift(tiny("llama"), text, (20, 100), reading=FEW)
    with pytest.raises(PosencError, match="two windows"):
        shift(tiny("llama"), text, (64,), reading=Reading(windows=1, scored=15))
    own = tiny("llama", rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0})
    with pytest.raises(PosencError, match="does not take position ids"):
        shift(own, text, (64,), reading=FEW)
