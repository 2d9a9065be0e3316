"""Prompts, chats, several sources: what is learned is what was meant, from where it was meant, as often as meant."""

import json
import random
from collections import Counter

import pytest
import torch
from cells import VOCAB, tiny
from transformers import AutoTokenizer

from hf_posenc import PosencError
from hf_posenc.models import model_path
from hf_posenc.training.examples import Examples, Tokens, of_chat, of_prompt, pack_examples, whole_examples
from hf_posenc.training.mixture import Choice, Mixture, split_by_length
from hf_posenc.training.preparation import held_out_rows, training_rows
from hf_posenc.training.rows import IGNORED, Stream, causal_inputs, collate
from hf_posenc.training.settings import DataSettings, LongDocuments
from hf_posenc.training.settings_file import read_settings
from hf_posenc.training.sources import load_corpora, load_corpus

CHAT = [
    {"role": "user", "content": "What is two and two?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "And one more?"},
    {"role": "assistant", "content": "Five, I think."},
]
PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</>\n"
    "{% endgeneration %}{% else %}{{ m.content }}</>\n{% endif %}{% endfor %}"
)
FORGETS = (
    "{% for m in messages %}{% if loop.last or m.role == 'user' %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(model_path("tiny"))


def predicted_texts(tokenizer, tokens: Tokens) -> list[str]:
    """The stretches that are predicted, as text."""
    found, before = [], False
    for token, wanted in zip(tokens.ids, tokens.predicted, strict=True):
        if wanted and not before:
            found.append([])
        if wanted:
            found[-1].append(token)
        before = wanted
    return [tokenizer.decode(part) for part in found]


def test_a_completion_is_learned_and_its_prompt_is_not(tokenizer):
    tokens = of_prompt(tokenizer, ("Name a colour: ", "blue"))
    assert predicted_texts(tokenizer, tokens) == ["blue" + tokenizer.eos_token]
    assert tokens.ids[0] == tokenizer.bos_token_id and not tokens.predicted[0]
    assert tokenizer.decode(tokens.ids, skip_special_tokens=True) == "Name a colour: blue"


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["by its prompts", "by its marks"])
def test_of_a_chat_what_the_assistant_says_is_learned(tokenizer, template):
    tokenizer.chat_template = template
    tokens = of_chat(tokenizer, CHAT)
    assert predicted_texts(tokenizer, tokens) == ["Four.</>\n", "Five, I think.</>\n"]
    assert tokenizer.decode(tokens.ids) == tokenizer.apply_chat_template(CHAT, tokenize=False)


def test_a_template_that_tells_too_little_is_refused(tokenizer):
    with pytest.raises(PosencError, match="this one has none"):
        of_chat(tokenizer, CHAT)
    tokenizer.chat_template = FORGETS
    with pytest.raises(PosencError, match="changes earlier turns"):
        of_chat(tokenizer, CHAT)


def example(first: int, prompt: int, answer: int) -> Tokens:
    size = prompt + answer
    return Tokens(list(range(first, first + size)), [False] * prompt + [True] * answer)


def test_labels_are_those_of_answers_at_their_own_places():
    row = pack_examples([example(10, 2, 3), example(40, 1, 2)], room=10, pad=0)
    inputs = causal_inputs(row)
    assert inputs["input_ids"].tolist() == [10, 11, 12, 13, 14, 40, 41, 42, 0, 0]
    assert inputs["labels"].tolist() == [IGNORED, IGNORED, 12, 13, 14, IGNORED, 41, 42, IGNORED, IGNORED]
    assert inputs["position_ids"].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 1]
    assert inputs["padding"].item() == 2


def test_no_gradient_crosses_from_a_prompt_to_another_answer():
    """Neither over the border between examples, nor into padding."""
    model = tiny("llama")
    torch.manual_seed(0)
    examples = [Tokens(torch.randint(3, VOCAB, (6,)).tolist(), [False] * 3 + [True] * 3) for _ in range(2)]
    batch = collate([causal_inputs(pack_examples(examples, room=15, pad=0))])
    embedded = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_(True)
    logits = model(inputs_embeds=embedded, position_ids=batch["position_ids"], use_cache=False).logits
    labels = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
    losses = torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="none", ignore_index=IGNORED)
    second = torch.autograd.grad(losses[6:].sum(), embedded)[0][0].abs().sum(-1)
    assert not second[:6].any() and second[6:11].all() and not second[12:].any()
    alone = model(torch.tensor([examples[1].ids]), labels=torch.tensor([[IGNORED] * 3 + examples[1].ids[3:]])).loss
    torch.testing.assert_close(losses[6:].sum() / 3, alone)


def test_examples_stay_whole_and_each_is_seen_before_any_is_seen_again():
    sizes = [3, 5, 2, 7, 4, 6, 12]
    examples = [example(100 * i, 1, size - 1) for i, size in enumerate(sizes)]
    for cut in (Examples(examples, 0), None):
        if cut is None:
            streamed = whole_examples(lambda: iter(examples), 0)
            rows = [streamed(i, 12) for i in range(40)]
        else:
            rows = [cut.cut(i, 12, 0) for i in range(40)]
        assert all(len(row.ids) == sum(row.pieces) == 12 for row in rows)
        seen = []
        for row in rows:
            start = 0
            for piece in row.pieces[: len(row.pieces) - bool(row.padding)]:
                number = row.ids[start] // 100
                assert row.ids[start : start + piece] == examples[number].ids
                seen.append(number)
                start += piece
            assert row.padding == 12 - start
        assert all(set(seen[at : at + 7]) == set(range(7)) for at in range(0, len(seen) - 7, 7))
    first, again = Examples(examples, 0), Examples(examples, 0)
    assert [again.cut(i, 12, 0) for i in reversed(range(9))][::-1] == [first.cut(i, 12, 0) for i in range(9)]


def test_sources_are_read_as_often_as_they_weigh():
    parts = [Stream([list(range(1000 * n, 1000 * n + 900))]) for n in range(3)]
    mixture = Mixture(parts, Choice([6.0, 3.0, 1.0], 2000, seed=0))
    found = [mixture.cut(i, 8, 0).ids for i in range(2000)]
    count = Counter(ids[0] // 1000 for ids in found)
    assert [round(count[n] / 200) for n in range(3)] == [6, 3, 1]
    for n in range(3):  # of each, all is seen before any is seen again
        own = [ids for ids in found if ids[0] // 1000 == n][: 900 // 8]
        assert len({ids[0] for ids in own}) == len(own)


def test_long_documents_come_more_often():
    documents = [[7] * 100] + [[1] * 10] * 30
    parts = split_by_length(documents, LongDocuments(tokens=50, weight=6.0))
    assert [share for _, share in parts] == pytest.approx([600 / 900, 300 / 900])
    assert [len(stream) for stream, _ in parts] == [100, 300]


def files(tmp_path) -> dict[str, str]:
    rng = random.Random(0)
    texts = [" ".join(rng.choice(("alpha", "beta", "gamma")) for _ in range(90)) for _ in range(60)]
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    prompts = [{"prompt": f"Count to {i}: ", "completion": " ".join(map(str, range(i)))} for i in range(1, 40)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps(record) for record in prompts))
    (tmp_path / "chats.jsonl").write_text("\n".join(json.dumps({"messages": CHAT}) for _ in range(30)))
    return {name: str(tmp_path / name) for name in ("text.jsonl", "prompts.jsonl", "chats.jsonl")}


@pytest.mark.parametrize("streaming", [True, False])
def test_a_recipe_reads_several_formats_at_once(tmp_path, tokenizer, streaming):
    paths, too_long = files(tmp_path), "drop" if streaming else "refuse"
    sources = (
        f"[{{path: {paths['text.jsonl']}, weight: 1, streaming: {streaming}}}, {{path: {paths['prompts.jsonl']}, "
        f"format: prompt_completion, weight: 3, streaming: {streaming}, too_long: {too_long}}}]"
    )
    settings = read_settings("tiny_yarn", ["--data.length=128", f"--data.sources={sources}", "--data.passkey=0.0"])
    texts = load_corpora(settings.data)
    rows = training_rows(settings, texts, tokenizer, 4)
    some = [row for row, _ in zip(iter(rows), range(200), strict=False)]
    prompts = [row for row in some if "Count to" in tokenizer.decode(row["input_ids"])]
    assert 0.65 < len(prompts) / 200 < 0.85
    assert not any("Count to" in tokenizer.decode(row["labels"][row["labels"] != IGNORED]) for row in prompts)
    assert all(len(row["input_ids"]) == 128 for row in some)
    kept = held_out_rows(settings, texts, tokenizer)
    assert len(kept) == 16 and torch.equal(kept[0]["input_ids"], kept[0]["input_ids"])


def test_examples_longer_than_a_row_are_refused_or_left_out_as_told(tmp_path, tokenizer):
    path = files(tmp_path)["prompts.jsonl"]
    asked = ["--data.length=48", f"--data.path={path}", "--data.format=prompt_completion", "--data.passkey=0.0"]
    settings = read_settings("tiny_yarn", asked)
    with pytest.raises(PosencError, match=r"\d+ of the \d+ examples .* longer than a row of 48 tokens"):
        training_rows(settings, load_corpora(settings.data), tokenizer, 4)
    streamed = read_settings("tiny_yarn", [*asked, "--data.streaming=true"])
    with pytest.raises(PosencError, match="cannot be refused before"):
        training_rows(streamed, load_corpora(streamed.data), tokenizer, 4)
    dropping = read_settings("tiny_yarn", [*asked, "--data.too_long=drop"])
    row = training_rows(dropping, load_corpora(dropping.data), tokenizer, 4)[0]
    assert int(row["input_ids"][row["labels"] != IGNORED][-1]) == tokenizer.eos_token_id


def test_examples_are_held_out_whole(tmp_path):
    found = load_corpus(DataSettings(path=files(tmp_path)["prompts.jsonl"], format="prompt_completion", length=8))
    trained = list(found.documents())
    assert found.held_out and not {*trained} & {*found.held_out} and len(trained) + len(found.held_out) == 39


@pytest.mark.parametrize(
    "record, asked, said",
    [
        ({"prompt": "a"}, {"format": "prompt_completion"}, r"no column 'completion' \(data.completion\)"),
        ({"prompt": 3, "completion": "b"}, {"format": "prompt_completion"}, "holds int, not text"),
        ({"messages": "hello"}, {"format": "chat"}, r"lists of \{role, content\}"),
        ({"messages": [{"role": "user", "content": "hello"}]}, {"format": "chat"}, "no turn of the assistant"),
        ({"chat": []}, {"format": "chat"}, r"no column 'messages' \(data.messages\)"),
    ],
)
def test_records_that_do_not_fit_are_told(tmp_path, record, asked, said):
    file = tmp_path / "records.jsonl"
    file.write_text(json.dumps(record) + "\n")
    with pytest.raises(PosencError, match=said):
        load_corpus(DataSettings(path=str(file), length=8, **asked))


@pytest.mark.parametrize(
    "asked, said",
    [
        ({"path": "a.txt", "sources": [{"path": "b.txt"}]}, "path beside sources"),
        ({"format": "chat", "short": {"share": 0.1, "length": 4}}, "short would cut prompts"),
        ({"format": "chat", "documents": "joined"}, "must not attend to another prompt"),
        ({"sources": [{"path": "a", "weight": 0.0}]}, "weight"),
        ({"long_documents": {"tokens": 9, "weight": 2.0}, "streaming": True}, "needs all texts in memory"),
    ],
)
def test_what_makes_no_sense_together_is_refused(asked, said):
    with pytest.raises(ValueError, match=said):
        DataSettings(length=8, **asked)
