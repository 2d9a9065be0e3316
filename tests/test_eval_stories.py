"""A LLaMA trained at 256 tokens reads novels: what evaluation says of it must be so."""

import pytest
import torch
from transformers import AutoTokenizer

from hf_posenc import load
from hf_posenc.evaluation import Options, Reading, compare, standings, tokenized


@pytest.fixture(scope="module")
def rows(stories, novel):
    tokenizer = AutoTokenizer.from_pretrained(stories)
    text = tokenized({"persuasion": novel}, tokenizer)
    model = load(stories, dtype=torch.float32)
    options = Options(lengths=(256, 1024), reading=Reading(windows=8))
    return compare(model, tokenizer, "dynamic_ntk:factor=4,yarn", text, target_length=1024, options=options)


def losses(rows, scheme):
    return {
        row.length: row.value for row in rows if row.scheme == scheme and row.metric == "loss" and row.task != "tax"
    }


def test_unpatched_it_explodes_past_what_it_was_trained_at(rows):
    found = losses(rows, "unpatched")
    assert found[1024] > 1.15 * found[256]


@pytest.mark.parametrize("scheme", ["dynamic_ntk:factor=4", "yarn"])
def test_schemes_hold_at_four_times_the_length(rows, scheme):
    found = losses(rows, scheme)
    assert found[1024] < 1.1 * found[256]
    assert found[1024] < losses(rows, "unpatched")[1024] - 0.5


def test_the_tax_in_the_short_is_small(rows):
    taxes = {(row.scheme, row.length): row for row in rows if row.task == "tax"}
    assert {length for _, length in taxes} == {128, 256}
    assert abs(taxes["dynamic_ntk:factor=4", 256].value) < 1e-3  # nothing changes within the trained length
    assert abs(taxes["yarn", 256].value) < 0.3


def test_the_exploded_model_ranks_last(rows):
    last = next(s for s in standings(rows) if s.length == 1024 and s.scheme == "unpatched")
    assert last.rank == 3
