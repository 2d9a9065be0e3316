"""Needles: the prompts, and what is made of answers."""

import json
import re

import pytest
import torch
from cells import CAUSAL, options, tiny, tokens
from evaluated import STORY, bytes_tokenizer, reader

from hf_posenc import PosencError, patch_model
from hf_posenc.evaluation import Retrieval, retrieval, tokenized
from hf_posenc.evaluation.measures.needles import MAKERS, trials
from hf_posenc.evaluation.measures.retrieval import Prompted, accuracy, continuation, share_ranked_first, share_written

FEW = Retrieval(trials=2, depths=(0.0, 0.5, 1.0), distractors=3, needles=2)


@pytest.fixture(scope="module")
def tokenizer():
    return bytes_tokenizer()


@pytest.fixture(scope="module")
def story(tokenizer):
    return tokenized({"story": STORY}, tokenizer)


def test_the_passkey_prompt_is_that_of_its_paper(tokenizer):
    for trial in trials("passkey", 700, tokenizer, FEW):
        opening, before, needle, after, question = trial.prompt.split("\n")
        key = trial.answers[0].strip()
        assert opening == (
            "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will "
            "quiz you about the important information there."
        )
        assert needle == f"The pass key is {key}. Remember it. {key} is the pass key."
        assert question == "What is the pass key? The pass key is"
        garbage = " ".join(
            ["The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."] * 50
        )
        assert garbage.startswith(before) and garbage.startswith(after)
        assert 1 <= int(key) <= 50_000
        share = len(before) / (len(before) + len(after))
        assert share == pytest.approx(trial.depth, abs=0.05)


@pytest.mark.parametrize("task", MAKERS)
@pytest.mark.parametrize("length", [900, 1301])
def test_prompts_fit_and_are_reproducible(task, length, tokenizer, story):
    made = trials(task, length, tokenizer, FEW, story)
    assert made == trials(task, length, tokenizer, FEW, story)
    assert made != trials(task, length, tokenizer, Retrieval(**{**vars(FEW), "seed": 1}), story)
    assert len(made) == 6 and len({trial.prompt for trial in made}) >= 5
    room = {"multivalue": 40, "json_kv": 50, "first_sentence": 30}.get(task, 10)
    step = 90 if task == "json_kv" else 12
    for trial in made:
        assert tuple(tokenizer(trial.prompt)["input_ids"]) == trial.ids
        assert length - room - step < len(trial.ids) <= length - room  # one more word, or pair, would be too much
        assert len({*trial.answers, *trial.distractors}) == len(trial.answers) + 3
        assert all(answer.strip() in trial.prompt for answer in trial.answers)
        assert trial.depth in (FEW.depths if task != "first_sentence" else [0.0])


def test_hard_distractors_are_in_the_text(tokenizer, story):
    for trial in trials("multikey", 900, tokenizer, FEW, story):
        assert trial.distractors[0] in trial.prompt
    for trial in trials("first_sentence", 900, tokenizer, FEW, story):
        assert trial.prompt.startswith(trial.answers[0].strip())
        assert all(text.strip() in trial.prompt for text in trial.distractors)


def test_pairs_are_an_object_that_has_the_answer_at_its_depth(tokenizer):
    for trial in trials("json_kv", 2500, tokenizer, FEW):
        before, found, question = trial.prompt.split("\n\n")
        pairs = json.loads(found)
        (key,) = re.findall(r'Key: "(.+)"', question)
        assert pairs[key] == trial.answers[0].strip() and list(pairs).index(key) == round(
            trial.depth * (len(pairs) - 1)
        )
        assert len(pairs) > 15 and {each.strip() for each in trial.distractors} < set(pairs.values())
        assert before.startswith("Extract the value") and question.endswith("Corresponding value:")


def test_what_does_not_fit_is_refused(tokenizer, story):
    with pytest.raises(PosencError, match=r"takes \d+ tokens, and there is room for 90"):
        trials("passkey", 100, tokenizer, FEW)
    with pytest.raises(PosencError, match="too short for first_sentence at 50000"):
        trials("first_sentence", 50_000, tokenizer, FEW, story)
    with pytest.raises(PosencError, match="none was given"):
        trials("first_sentence", 500, tokenizer, FEW)
    with pytest.raises(PosencError, match="from 0 "):
        Retrieval(depths=(0.5, 1.5))


@pytest.mark.parametrize("scheme", [None, "dynamic_ntk", "yarn", "alibi", "t5", "sinusoidal"])
@pytest.mark.parametrize("kind", CAUSAL)
def test_continuations_over_a_cache_are_those_of_full_passes(kind, scheme):
    model = tiny(kind, max_position_embeddings=64)
    if scheme:
        patch_model(model, scheme, **options(scheme))
    ids = tokens(2, 40)
    answers = [[5, 9, 11], [7, 8]]
    prompted = Prompted(model, ids)
    written = prompted.greedy(4, {2})
    first = prompted.losses(answers)
    assert first == prompted.losses(answers)  # nothing is left of the last question
    for row, answer, found, text in zip(ids, answers, first, written, strict=True):
        whole = torch.cat([row, torch.tensor(answer)])[None]
        with torch.no_grad():
            logits = model(whole).logits[0, 39:-1].log_softmax(-1)
        expected = -sum(logits[i, token].item() for i, token in enumerate(answer))
        assert found == pytest.approx(expected, abs=2e-3)
        made = model.generate(row[None], max_new_tokens=4, do_sample=False, attention_mask=torch.ones(1, 40))[0, 40:]
        assert text == [token for token in made.tolist() if token != 2]


@pytest.mark.parametrize("scheme", ["yarn", "dynamic_ntk", "alibi"])
def test_prompts_that_are_read_in_parts_say_the_same(scheme):
    model, ids = patch_model(tiny("llama"), scheme, **options(scheme)), tokens(2, 70)
    whole, parts = Prompted(model, ids), Prompted(model, ids, step=16)
    answers = [[5, 6, 7], [8, 9]]
    assert parts.losses(answers) == pytest.approx(whole.losses(answers), abs=1e-4)
    assert parts.greedy(5, set()) == whole.greedy(5, set())


def test_models_without_an_exact_cache_are_read_anew():
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
    model, ids = tiny("llama", rope_parameters=rope), tokens(1, 60)
    prompted = Prompted(model, ids)
    assert prompted.cache is None
    with torch.no_grad():
        logits = model(torch.cat([ids, torch.tensor([[5, 9]])], 1)).logits[0, -3:-1].log_softmax(-1)
    assert prompted.losses([[5, 9]])[0] == pytest.approx(-(logits[0, 5] + logits[1, 9]).item(), abs=0.2)
    assert len(prompted.greedy(3, set())[0]) == 3


def test_only_the_first_integer_counts():
    assert share_written([" 123"], " 123. Remember 999") == 1
    assert (
        share_written([" 123"], " 1234") == share_written([" 123"], " 12 123") == share_written([" 123"], "none") == 0
    )
    assert share_written([" 12", " 34"], " 34 and 56 and 12") == 0.5
    assert share_written([" It was late"], ' "It was late in') == 1
    assert share_written([" It was late"], " So it was late") == 0


def test_answers_must_beat_all_distractors():
    assert share_ranked_first([1.0], [2.0, 3.0]) == 1
    assert share_ranked_first([2.0], [2.0, 3.0]) == 0  # a draw is lost
    assert share_ranked_first([1.0, 5.0], [2.0, 6.0]) == 0.5
    assert share_ranked_first([1.0, 2.0], [3.0]) == 1


def test_the_error_of_a_perfect_score_is_not_nothing():
    value, error = accuracy([1.0] * 10)
    assert value == 1 and error == pytest.approx((12 / 14 * 2 / 14 / 14) ** 0.5)


def test_answers_continue_the_prompt(tokenizer):
    assert tokenizer.decode(continuation(tokenizer, "The pass key is", " 123")) == " 123"


class Oracle:
    """Stands where a model's logits are made: whoever copies what followed the same words before gets full marks."""

    def __init__(self, model):
        self.model = model
        model.lm_head.register_forward_hook(self.copy)
        model.model.register_forward_pre_hook(self.see, with_kwargs=True)
        self.seen = []

    def see(self, module, args, kwargs):
        ids = kwargs["input_ids"].tolist()
        past = kwargs.get("past_key_values")
        known = 0 if past is None else past.get_seq_length()
        self.seen = [(self.seen[i][:known] if known else []) + row for i, row in enumerate(ids)]

    def copy(self, head, args, output):
        scores = torch.zeros_like(output)
        count, length = output.shape[1], len(self.seen[0])
        for row, text in enumerate(self.seen):
            for column in range(count):
                at = length - count + column + 1
                scores[row, column, following(text[:at])] = 9.0
        return scores


def following(text):
    """What came after the last ten tokens when they first stood in the text."""
    tail = text[-10:]
    return next((text[i + 10] for i in range(len(text) - 10) if text[i : i + 10] == tail), 5)


def test_a_model_that_copies_finds_every_passkey_and_another_none(tokenizer):
    model = reader(max_position_embeddings=600)
    before = retrieval(model, tokenizer, "passkey", 600, asked=FEW)
    assert {row.value for row in before if row.protocol == "generation"} == {0.0}
    Oracle(model)
    rows = retrieval(model, tokenizer, "passkey", 600, asked=FEW, batch_size=1)
    assert [row.value for row in rows] == [1.0] * 6
    assert {(row.details["depth"], row.protocol) for row in rows} == {
        (depth, protocol) for depth in FEW.depths for protocol in ("likelihood", "generation")
    }
    (trial, _) = rows[0].details["trials"]
    assert trial["prompt"].endswith("The pass key is") and trial["answers"][0].strip() in trial["generated"]
    assert rows[0].n == 2 and rows[0].details["chance"] == 0.25 and max(rows[0].details["tokens"]) <= 590
