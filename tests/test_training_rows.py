"""Rows to train on: as long as asked for, answers marked, in the words of the evaluation."""

import random
import re
from itertools import pairwise

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_posenc.evaluation.measures.needles import OPENING, PASSKEY, PASSKEY_QUESTION, WORDS, filler, haystack
from hf_posenc.evaluation.measures.retrieval import share_written
from hf_posenc.training.retrieval import END, ROWS, hide_needle, pairs_row, passkey_row, repeats_row

TEXT = "Returns the value of the counter, or raises; see below. " * 400


@pytest.fixture(scope="module")
def tokenizer():
    """Bytes, but for some whole words."""
    vocabulary = sorted({*pre_tokenizers.ByteLevel.alphabet(), "<end>"})
    merges, seen = [], set(vocabulary)
    for word in ("Ġthe", "Ġkey", "Ġpass", "Ġis", "grass", "Ġgreen"):
        for stop in range(2, len(word) + 1):
            if word[:stop] not in seen:
                merges.append((word[: stop - 1], word[stop - 1]))
                vocabulary.append(word[:stop])
                seen.add(word[:stop])
    bpe = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, merges))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<end>")


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("texts", [(), (TEXT,), ("too short",)])
def test_rows_are_exactly_as_long_as_asked_for_and_follow_from_their_seed(kind, texts, tokenizer):
    for length in (480, 481, 700):
        for seed in range(8):
            ids, answers = ROWS[kind](random.Random(seed), tokenizer, length, texts)
            assert len(ids) == len(answers) == length
            assert any(answers) and not all(answers)
            assert (ids, answers) == ROWS[kind](random.Random(seed), tokenizer, length, texts)
    assert ids != ROWS[kind](random.Random(99), tokenizer, length, texts)[0]


@pytest.mark.parametrize("texts", [(), (TEXT,)])
def test_the_passkey_is_asked_in_the_words_of_the_evaluation_and_answered_strictly(texts, tokenizer):
    real = 0
    for seed in range(30):
        ids, answers = passkey_row(random.Random(seed), tokenizer, 600, texts)
        first, last = answers.index(True), 600 - answers[::-1].index(True)
        assert all(answers[first:last])
        prompt, answer = tokenizer.decode(ids[:first]), tokenizer.decode(ids[first:last])
        assert answer.endswith(END) and share_written((answer.removesuffix(END),), answer + "7")
        needle = PASSKEY.format(answer.removesuffix(END).strip())
        assert prompt.startswith(OPENING + "\n") and prompt.endswith("\n" + PASSKEY_QUESTION) and needle in prompt
        real += "counter" in prompt
    assert (3 < real < 20) if texts else not real


def test_a_prompt_is_the_evaluations_own_where_key_and_depth_are_the_same(tokenizer):
    for seed in range(10):
        ids, answers = passkey_row(random.Random(seed), tokenizer, 600)
        prompt, key = tokenizer.decode(ids[: answers.index(True)]), re.search(r"\d+", tokenizer.decode(ids))[0]
        before, after = (len(line.split()) for line in prompt.split("\n")[1:4:2])
        needle, words = PASSKEY.format(key), before + after
        assert haystack([(before / words, needle)], PASSKEY_QUESTION, words) == prompt


def test_real_text_stands_around_the_needle_as_filler_does():
    words = filler(9).split()
    assert hide_needle("x", "q", words, 1.0) == haystack([(1.0, "x")], "q", 9)
    assert hide_needle("x", "q", words, 0.0) == haystack([(0.0, "x")], "q", 9)
    assert hide_needle("x", "q", ["a", "b", "c", "d"], 0.5) == f"{OPENING}\na b\nx\nc d\nq"


def test_keys_stand_everywhere_and_often_at_the_start(tokenizer):
    depths = []
    for seed in range(200):
        ids, _ = passkey_row(random.Random(seed), tokenizer, 600)
        body = tokenizer.decode(ids)[len(OPENING) :]
        depths.append(body.index("The pass key is") / body.index("What is"))
    assert 20 < sum(depth < 0.01 for depth in depths) < 60
    assert sum(depth > 0.6 for depth in depths) > 30


def test_answers_of_pairs_can_be_looked_up(tokenizer):
    for seed in range(20):
        ids, answers = pairs_row(random.Random(seed), tokenizer, 2000)
        starts = [i for i in range(1, 2000) if answers[i] and not answers[i - 1]]
        assert starts
        for start in starts:
            stop = next((i for i in range(start, 2000) if not answers[i]), 2000)
            said = tokenizer.decode(ids[start:stop])
            if stop < 2000:  # the last one may be cut
                asked = tokenizer.decode(ids[:start]).rsplit("\n", 1)[-1]
                word = next((word for word in WORDS if word in asked), "key")
                assert said.endswith(END) and f"{word} is {said.strip()}" in tokenizer.decode(ids[:start])


def test_marked_tokens_of_repeats_follow_the_same_token_as_before(tokenizer):
    for seed in range(20):
        ids, answers = repeats_row(random.Random(seed), tokenizer, 300)
        before = [i for i in range(1, 300) if answers[i]]
        assert len(before) > 60
        assert all((ids[i - 1], ids[i]) in pairwise(ids[:i]) for i in before)
        assert tokenizer.eos_token_id not in ids
