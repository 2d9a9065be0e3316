"""Pairs cut from one text, and the loss by which they find each other."""

import random

import pytest
import torch
from cells import tiny, tokens
from transformers import AutoModel

from hf_posenc import patch_model
from hf_posenc.training.contrastive import TEMPERATURE, Pairs, contrastive_loss, mean_states
from hf_posenc.training.rows import Row, skip_positions

TEXT = list(range(100, 400))


@pytest.mark.parametrize("kept", [0.0, 1.0])
def test_a_query_is_a_stretch_of_its_text(kept):
    pairs = Pairs([1], [2], query=32, kept=kept)
    whole = 0
    for seed in range(50):
        made = pairs.inputs(Row(TEXT, [300]), random.Random(seed))
        query, document = made["query_ids"].tolist(), made["input_ids"].tolist()
        assert query[0] == document[0] == 1 and query[-1] == document[-1] == 2
        assert query[1:-1] == list(range(query[1], query[1] + 32))
        assert len(document) == 300 - 32 + 2  # nothing is padded
        assert set(document[1:-1]) <= set(TEXT)
        inside = set(query[1:-1]) <= set(document)
        whole += inside
        if not inside:
            assert not set(query[1:-1]) & set(document)
    assert whole == 0 if kept == 0 else whole > 35  # a stretch at the end cannot be kept


def test_positions_may_leap():
    row = skip_positions(Row(TEXT, [300]), random.Random(0), target=1000, chunks=2)
    made = Pairs([1], [2], query=32).inputs(row, random.Random(0))
    positions = made["position_ids"].tolist()
    assert len(positions) == len(made["input_ids"]) and positions[0] == 0
    assert positions == row.positions[: len(positions)]


def test_the_loss_is_cross_entropy_of_cosines_both_ways():
    model = tiny("bert").base_model
    inputs = {
        "input_ids": tokens(3, 20),
        "query_ids": tokens(3, 6, seed=2),
        "position_ids": torch.arange(20).expand(3, -1),
    }
    with torch.no_grad():
        found = contrastive_loss(model, inputs)
        queries = model(inputs["query_ids"]).last_hidden_state.mean(1)
        documents = model(inputs["input_ids"]).last_hidden_state.mean(1)
    scores = torch.nn.functional.cosine_similarity(queries[:, None], documents[None], dim=-1) / TEMPERATURE
    ways = [scores.log_softmax(dim).diagonal().mean() for dim in (0, 1)]
    torch.testing.assert_close(found, -(ways[0] + ways[1]) / 2)


def test_training_brings_pairs_together():
    torch.manual_seed(0)
    model = patch_model(AutoModel.from_config(tiny("bert").config), "learned", target_length=64, resize="cyclic")
    inputs = {"input_ids": tokens(4, 40), "query_ids": tokens(4, 8), "position_ids": torch.arange(40).expand(4, -1)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        loss = contrastive_loss(model, inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    norms = mean_states(model, input_ids=inputs["query_ids"]).norm(dim=-1)
    torch.testing.assert_close(norms, torch.ones(4))
