"""Tiles: each pair that is seen is in one of them, and outputs and gradients are those of scores written out."""

import pytest
import torch
from cells import LENGTH, options, tiny, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.masking_utils import sdpa_mask

from hf_posenc import patch_model
from hf_posenc.compat import pytorch
from hf_posenc.core.effects import FollowingRotation, LateRotation
from hf_posenc.core.patterns import Banded, Chunked, Far, Scattered
from hf_posenc.runtime import layouts, masks, tiles, zones
from hf_posenc.runtime.layouts import find_texts, layout
from hf_posenc.runtime.positions import Positions

PATTERNS = {
    "window": lambda a, b: Banded(causal=True, window=a),
    "self_extend": lambda a, b: Banded(causal=True, window=a, far=Far(divisor=float(b), whole=True, offset=3.0)),
    "rerope": lambda a, b: Banded(causal=True, window=a, far=Far(divisor=float("inf"), offset=float(a))),
    "streaming": lambda a, b: Banded(
        causal=True, window=a, far=Far(divisor=1.0, offset=a + b - 1.0, capped=True, first=b)
    ),
    "dca": lambda a, b: Chunked(causal=True, chunk=a, reach=a + b),
    "sparse": lambda a, b: Scattered(causal=True, window=a, global_tokens=b),
}


def make_positions(name, window, other):
    rotation = None if name in ("window", "sparse") else LateRotation(inv_freq=(1.0, 0.3, 0.05), attention_scaling=1.2)
    return Positions(rotation, torch.device("cpu"), pattern=PATTERNS[name](window, other))


def pairs_in(plan, length):
    """How often each pair of tokens is in a tile."""
    found = torch.zeros(length, length, dtype=torch.long)
    slots = torch.arange(length)[None, None, :, None]
    for keys in plan:
        for queries in keys.queries:
            for tile in queries.tiles:
                q, k = tile.query.of(slots)[0, 0, ..., 0], tile.key.of(slots)[0, 0, ..., 0]
                assert int(k.max()) < keys.end
                assert queries.tokens.start <= int(q.min()) and int(q.max()) < queries.tokens.stop
                if tile.back:
                    q, k = q.flip(1), k.flip(1)
                for rows, columns in zip(q.tolist(), k.tolist(), strict=True):
                    for i, row in enumerate(rows):
                        found[row, columns[: i + 1] if tile.causal else columns] += 1
    return found


@pytest.mark.parametrize("name", PATTERNS)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(length=st.integers(1, 40), window=st.integers(1, 20), other=st.integers(1, 9))
def test_each_pair_that_is_seen_is_in_one_tile(name, length, window, other):
    at = torch.arange(length)[None]
    held = make_positions(name, window, other)
    found = pairs_in(layout(held, at), length)
    assert torch.equal(found, held.pattern.visible(at, at)[0].long())


@settings(max_examples=40, deadline=None, derandomize=True)
@given(length=st.integers(1, 60), border=st.integers(1, 30), step=st.integers(1, 20), first=st.integers(0, 50))
def test_stages_hold_each_pair_once(length, border, step, first):
    rotation = FollowingRotation(inv_freq=(1.0, 0.1), weights=(0.0, 1.0), border=border, step=step)
    held, at = Positions(rotation, torch.device("cpu")), torch.arange(first, first + length)[None]
    found = pairs_in(layout(held, at), length)
    assert torch.equal(found, torch.ones(length, length, dtype=torch.long).tril())


def document_mask(at):
    """The mask that transformers makes of documents that stand side by side; -1 is padding."""
    real, number = at >= 0, (at.diff(dim=-1, prepend=at[:, :1] - 1) != 1).long().cumsum(-1)
    same = (number[:, :, None] == number[:, None, :]) & real[:, :, None] & real[:, None, :]
    return (same & torch.ones(at.shape[1], at.shape[1], dtype=torch.bool).tril())[:, None]


LAYOUTS = {
    "whole": [[*range(37)]] * 2,
    "left": [[-1] * 9 + [*range(28)], [*range(37)]],
    "right": [[*range(37)], [*range(20)] + [-1] * 17],
    "packed": [[*range(10), *range(27)], [*range(5), *range(1), *range(31)]],
}


def work(name, rows, dtype, groups=2, window=7, other=3):
    generator = torch.Generator().manual_seed(0)
    at = torch.tensor(rows)
    made = [torch.randn(len(at), h, at.shape[1], 8, generator=generator).to(dtype) for h in (2 * groups, 2, 2)]
    mask = None if rows == LAYOUTS["whole"] else document_mask(at)
    held = make_positions(name, window, other)
    return zones.Work(*(x.requires_grad_() for x in made), mask, at.clamp(min=0), at.clamp(min=0), held.pattern, held,
                      0.3, 0.0, None, None, None)  # fmt: skip


def attend_in_tiles(w):
    job = layouts.plan_job(w.query, w.key, w.value, w.mask, w.at, w.keys_at, w.shared, w.scaling)
    assert job is not None
    return tiles.attend(w.query, w.key, w.value, job)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PATTERNS)
def test_outputs_and_gradients_are_those_of_scores_written_out(name, layout):
    """In fp64, with grouped heads, for one text, padded rows and several texts in a row."""
    w = work(name, LAYOUTS[layout], torch.float64)
    real = torch.tensor(LAYOUTS[layout]) >= 0
    weight = torch.randn(*w.query.shape[:1], w.query.shape[2], w.query.shape[1], 8, dtype=torch.float64)
    found, (meant, _) = attend_in_tiles(w), zones.in_blocks(w, w.mask is None, False)
    # scores there are in fp32
    torch.testing.assert_close(found[real], meant[real], atol=1e-5, rtol=1e-5)
    grads = [torch.autograd.grad((x * weight)[real].sum(), (w.query, w.key, w.value)) for x in (found, meant)]
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["self_extend", "dca", "sparse"])
def test_gradients_by_finite_differences(name):
    w = work(name, [[*range(11)]], torch.float64, groups=1, window=4)
    run = lambda q, k, v: attend_in_tiles(w._replace(query=q, key=k, value=v))  # noqa: E731
    assert torch.autograd.gradcheck(run, (w.query, w.key, w.value), atol=1e-6, fast_mode=True)


def test_masks_that_let_anything_else_through_are_not_laid_out():
    at = torch.tensor(LAYOUTS["packed"])
    fine = document_mask(at)
    assert [(s.rows.start, s.tokens.start, s.tokens.stop) for s in find_texts(fine, at, 2)] == [
        *((0, 0, 10), (0, 10, 37)),
        *((1, 0, 5), (1, 5, 6), (1, 6, 37)),
    ]
    for row, query, key in ((0, 3, 4), (0, 20, 5), (1, 36, 36), (1, 30, 7), (0, 12, 30)):
        other = fine.clone()
        other[row, 0, query, key] ^= True
        assert find_texts(other, at, 2) is None or (query, key) == (36, 36), (row, query, key)
    assert find_texts(fine, torch.arange(37)[None], 2) is None
    assert find_texts(None, at, 2) is None
    additive = torch.zeros_like(fine, dtype=torch.float32).masked_fill(~fine, torch.finfo(torch.float32).min)
    assert find_texts(additive, at, 2) == find_texts(fine, at, 2)


def test_a_mask_that_adds_to_what_is_seen_is_not_laid_out():
    at = torch.arange(6)[None]
    mask = torch.full((1, 1, 6, 6), torch.finfo(torch.float32).min).triu(1)
    assert find_texts(mask, at, 1) == [tiles.Span(slice(0, 1), slice(0, 6))]
    mask[..., :2] -= 1.0  # which is no padding
    assert find_texts(mask, at, 1) is None


def test_tokens_that_see_others_and_not_themselves_are_left_out_only_as_padding():
    """Behind a text padding sees the text, and nobody reads what comes of it; a mask that somebody made by hand may
    mean what it says."""
    real = torch.ones(1, 9, dtype=torch.bool)
    real[:, 6:] = False
    make = masks.keep_padding(sdpa_mask)
    mask = make(batch_size=1, q_length=9, kv_length=9, attention_mask=real)
    assert find_texts(mask, torch.arange(9)[None], 1) == [tiles.Span(slice(0, 1), slice(0, 6))]
    assert find_texts(mask.clone(), torch.arange(9)[None], 1) is None
    strict = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril(-1)
    assert find_texts(strict, torch.arange(9)[None], 1) is None


def test_a_mask_that_changes_is_looked_at_again():
    at = torch.arange(6)[None]
    mask = document_mask(at)
    assert find_texts(mask, at, 1) == [tiles.Span(slice(0, 1), slice(0, 6))]
    mask[0, 0, 5, 0] = False
    assert find_texts(mask, at, 1) is None


@pytest.mark.parametrize("scheme", ["dynamic_ntk", "longrope", "self_extend", "dca", "streaming", "window", "sparse"])
def test_models_train_in_tiles_as_they_do_in_blocks(scheme, monkeypatch):
    """Rows that are whole and rows that are padded on either side, and gradients of all weights."""
    given = {"window": 5, "global_tokens": 2} if scheme == "sparse" else options(scheme)
    model = patch_model(tiny("llama", num_hidden_layers=2), scheme, **given)
    ids, mask = tokens(3, 2 * LENGTH), torch.ones(3, 2 * LENGTH, dtype=torch.long)
    mask[0, :5], mask[1, -7:] = 0, 0
    at = (mask.cumsum(-1) - 1).clamp(min=0)
    labels = ids.masked_fill((mask == 0) | (at == 0), -100)  # no padding has to tell the first token
    tiled, run = [], tiles.attend
    monkeypatch.setattr(tiles, "attend", lambda *given: tiled.append(1) or run(*given))

    def step():
        model.zero_grad()
        found = model(ids, attention_mask=mask, position_ids=at, labels=labels, use_cache=False)
        found.loss.backward()
        return found.logits[mask.bool()], [p.grad.clone() for p in model.parameters() if p.grad is not None]

    logits, grads = step()
    assert len(tiled) == 2
    monkeypatch.setattr(pytorch, "CPU_ATTENTION", ())
    meant, slower = step()
    assert len(tiled) == 2
    torch.testing.assert_close(logits, meant, atol=2e-4, rtol=0)
    for mine, theirs in zip(grads, slower, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5 + 2e-4 * float(theirs.abs().max()), rtol=0)
