"""Protocols against values worked out by hand, and against few-line implementations of their own."""

import math

import pytest
import torch
from cells import LENGTH, tiny
from evaluated import bigram, bytes_tokenizer, document

from hf_posenc import PosencError, patch_model
from hf_posenc.evaluation import Document, Reading, loss_by_position, parsed_length, parsed_lengths, perplexity
from hf_posenc.evaluation.measures.estimates import differ, mean_and_error, t_quantile
from hf_posenc.evaluation.measures.texts import bos_of, spread_windows

# After 0: 0 and 1 with a half each. After 1: 0 with a quarter, 1 with three quarters. Losses are logs of these.
HALF, QUARTER, MOST = math.log(2), math.log(4), math.log(4 / 3)
TOY = torch.tensor([[0.5, 0.5, 0, 0], [0.25, 0.75, 0, 0], [0.25] * 4, [0.25] * 4]).clamp(min=1e-30).log()
TEXT = Document("toy", torch.tensor([0, 0, 1, 1, 1, 0, 1, 0]))
LOSSES = [HALF, HALF, MOST, MOST, QUARTER, HALF, QUARTER]  # of tokens 1 to 7


def loss(rows):
    (row,) = [row for row in rows if row.metric == "loss"]
    return row


def test_whole_by_hand():
    rows = perplexity(bigram(TOY), [TEXT], 8, protocol="whole")
    assert loss(rows).value == pytest.approx(sum(LOSSES) / 7, abs=1e-5)
    assert rows[1].metric == "perplexity" and rows[1].value == pytest.approx(math.exp(sum(LOSSES) / 7), abs=1e-4)
    assert loss(rows).n == 1 and loss(rows).stderr is None and loss(rows).details["tokens"] == 7


def test_last_by_hand():
    rows = perplexity(bigram(TOY), [TEXT], 4, longest=6, reading=Reading(windows=2, scored=2))
    first, second = (LOSSES[3] + LOSSES[4]) / 2, (LOSSES[5] + LOSSES[6]) / 2  # windows end at 6 and 8
    row = loss(rows)
    assert row.details["losses"] == pytest.approx([first, second], abs=1e-5)
    assert row.value == pytest.approx((first + second) / 2, abs=1e-5)
    assert row.stderr == pytest.approx(abs(first - second) / 2, abs=1e-5)
    assert (row.n, row.details["windows"], row.details["tokens"], row.details["seeds"]) == (2, 2, 4, 0)
    assert rows[1].stderr == pytest.approx(row.stderr * rows[1].value, rel=1e-6)


def test_sliding_by_hand():
    """Windows 0-4, 3-7, 6-8 score tokens 1-4, 5-6 and 7: every token once."""
    row = loss(perplexity(bigram(TOY), [TEXT], 5, protocol="sliding", reading=Reading(stride=2)))
    assert row.value == pytest.approx(sum(LOSSES) / 7, abs=1e-5)
    assert row.details["tokens"] == 7
    means = [sum(LOSSES[:4]) / 4, sum(LOSSES[4:6]) / 2, LOSSES[6]]
    assert row.details["losses"] == pytest.approx(means, abs=1e-5)


def test_yarn_by_hand():
    """BOS (token 2, after which all are equally likely), then windows of 4: 0-3, 2-5, 4-7; the mean of their means."""
    reading = Reading(stride=2)
    row = loss(perplexity(bigram(TOY), [TEXT], 5, protocol="yarn", bos=2, reading=reading))
    means = [(QUARTER + sum(LOSSES[:3])) / 4, sum(LOSSES[3:5]) / 2, sum(LOSSES[5:7]) / 2]
    assert row.value == pytest.approx(sum(means) / 3, abs=1e-5)
    cut = loss(perplexity(bigram(TOY), [TEXT], 5, protocol="yarn", bos=2, reading=Reading(truncate=True)))
    assert cut.value == pytest.approx(means[0], abs=1e-5) and cut.n == 1


def test_loss_by_position_by_hand():
    rows = loss_by_position(bigram(TOY), [TEXT], 8, reading=Reading(windows=1))
    assert [row.value for row in rows] == pytest.approx(LOSSES, abs=1e-5)
    assert [(row.details["from"], row.details["to"]) for row in rows] == [(i, i + 1) for i in range(1, 8)]


@torch.no_grad()
def one_by_one(model, ids, window):
    """Each token after the `window` - 1 before it."""
    losses = []
    for at in range(1, len(ids)):
        logits = model(ids[None, max(0, at - window + 1) : at]).logits[0, -1]
        losses.append(-logits.log_softmax(-1)[ids[at]].item())
    return sum(losses) / len(losses)


@pytest.mark.parametrize("scheme", [None, "dynamic_ntk", "alibi"])
def test_sliding_with_stride_one_scores_token_by_token(scheme):
    model, text = tiny("llama"), document(90)
    if scheme:
        patch_model(model, scheme)
    row = loss(perplexity(model, [text], 40, protocol="sliding", reading=Reading(stride=1)))
    assert row.value == pytest.approx(one_by_one(model, text.ids, 40), abs=1e-4)


@torch.no_grad()
def yarn_script(model, documents, bos, length, stride, truncate):
    """The loop of the YaRN repository's eval/perplexity.py, from its description."""
    nlls, size = [], length - 1
    for ids in documents:
        ids, step = (ids[:size], size) if truncate else (ids, stride)
        done = 0
        for begin in range(0, len(ids), step):
            end = min(begin + size, len(ids))
            row = torch.cat([torch.tensor([bos]), ids[begin:end]])[None]
            labels = row.clone()
            labels[:, : -(end - done)] = -100
            nlls.append(model(row, labels=labels).loss)
            done = end
            if end == len(ids):
                break
    return torch.stack(nlls).mean().item()


@pytest.mark.parametrize("truncate", [False, True])
@pytest.mark.parametrize("scheme", [None, "yarn"])
def test_yarn_is_the_script_of_its_paper(scheme, truncate):
    model, texts = tiny("llama"), [document(n, seed=n) for n in (101, 130)]
    if scheme:
        patch_model(model, scheme, factor=4.0)
    reading = Reading(stride=16, truncate=truncate)
    rows = perplexity(model, texts, 64, protocol="yarn", bos=1, reading=reading)
    expected = yarn_script(model, [text.ids for text in texts], 1, 64, 16, truncate)
    assert loss(rows).value == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("protocol", ["last", "sliding", "whole", "yarn"])
@pytest.mark.parametrize("scheme", ["unpatched", "dynamic_ntk", "t5"])
def test_no_figure_depends_on_batch_chunk_or_cache(protocol, scheme):
    model, texts = tiny("llama"), [document(150, seed=1), document(140, seed=2)]
    if scheme != "unpatched":
        patch_model(model, scheme)
    common = {"stride": 16, "scored": 8}
    ways = [{"batch_size": 1}, {"batch_size": 5, "chunk": 11}, {"chunk": 4, "step": 7}, {"step": 64, "batch_size": 3}]
    found = [
        loss(perplexity(model, texts, 3 * LENGTH, protocol=protocol, bos=1, reading=Reading(**common, **way))).value
        for way in ways
    ]
    assert found == pytest.approx([found[0]] * len(ways), abs=1e-4)


def test_last_scores_the_same_tokens_at_every_length():
    texts = [document(400, seed=1), document(300, seed=2)]
    windows = {n: spread_windows(texts, n, 200, 16, 6) for n in (50, 100, 200)}
    assert len({tuple((w.document, w.end, w.scored) for w in found) for found in windows.values()}) == 1
    assert {w.end - w.start for w in windows[50]} == {50}
    ends = [w.end for w in windows[200] if w.document == 0]
    assert ends == [200, 300, 400] and all(w.start >= 0 for w in windows[200])


@pytest.mark.parametrize("protocol", ["last", "sliding", "whole", "yarn"])
def test_a_text_too_short_says_how_much_is_needed(protocol):
    with pytest.raises(PosencError, match=r"'random' is too short .* (64|63) tokens are needed, and it has 50"):
        perplexity(tiny("llama"), [document(50)], 64, protocol=protocol, bos=1, reading=Reading(scored=8, stride=8))


def test_more_windows_than_the_text_holds_are_refused():
    reading = Reading(windows=10, scored=8)
    with pytest.raises(PosencError, match="136 tokens are needed, and it has 100"):
        perplexity(tiny("llama"), [document(100)], 64, reading=reading)
    assert loss(perplexity(tiny("llama"), [document(100)], 64, reading=Reading(scored=8))).n == 5


@pytest.mark.parametrize(
    "protocol, given, told",
    [
        ("sliding", {"windows": 4}, "does not use windows; last would"),
        ("last", {"max_tokens": 100}, "does not use max_tokens; sliding, yarn would"),
        ("lost", {}, "Did you mean 'last'"),
        ("yarn", {}, "this tokenizer has none"),
        ("sliding", {"stride": 100}, "skips tokens"),
        ("last", {"scored": 64}, "score fewer"),
    ],
)
def test_settings_that_mean_nothing_are_refused(protocol, given, told):
    with pytest.raises(PosencError, match=told):
        perplexity(tiny("llama"), [document(200)], 64, protocol=protocol, reading=Reading(**given))


def test_lengths():
    assert parsed_lengths("2k, 4096,1k") == [1024, 2048, 4096]
    assert parsed_length("1M") == 2**20
    for wrong in ("", "0", "4kb", "-1", "1.5k"):
        with pytest.raises(PosencError, match="A length is"):
            parsed_length(wrong)


def test_bos_is_what_the_tokenizer_does():
    tokenizer = bytes_tokenizer()
    assert bos_of(tokenizer, None) is None
    assert bos_of(tokenizer, True) == 0
    tokenizer.bos_token = None
    with pytest.raises(PosencError, match="no BOS"):
        bos_of(tokenizer, True)


def test_errors_of_means():
    assert mean_and_error([1.0, 2.0, 3.0]) == (2.0, pytest.approx(math.sqrt(1 / 3)))
    assert mean_and_error([1.0]) == (1.0, None)
    value, error = mean_and_error([1.0, 3.0], [3.0, 1.0])
    assert value == 1.5 and error == pytest.approx(math.sqrt(2 * (2.25 + 2.25)) / 4)
    # from tables of Student's t
    for freedom, expected in ((5, 2.571), (19, 2.093), (59, 2.001)):
        assert t_quantile(0.95, freedom) == pytest.approx(expected, rel=3e-3)


def test_only_what_errors_carry_is_separated():
    noise = torch.randn(60, generator=torch.Generator().manual_seed(0)).tolist()
    shifted = [x + 0.1 + 0.05 * y for x, y in zip(noise, reversed(noise), strict=True)]
    assert differ(noise, shifted)  # far apart, as pairs
    assert not differ(noise, list(reversed(noise)))
    assert not differ(noise, noise)
    assert not differ([1.0], [2.0])
