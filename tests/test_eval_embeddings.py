"""Retrieval by embeddings: documents that hide facts, vectors that padding and batches do not change, scores."""

import json
import math

import pytest
import torch
from cells import tiny
from evaluated import STORY, VOCAB, bytes_tokenizer
from scipy.stats import spearmanr
from transformers import AutoConfig, AutoModel
from typer.testing import CliRunner

from hf_posenc import PosencError, is_patched, patch_model, save
from hf_posenc.cli.main import app
from hf_posenc.evaluation import Document, Options, compare, evaluate, tokenized
from hf_posenc.evaluation.measures.embeddings import (
    Chunked,
    Pooled,
    embed,
    embedding_retrieval,
    others,
    own_ranks,
    passages,
    pieces,
    similarity_rows,
    spearman,
)
from hf_posenc.evaluation.measures.haystacks import HAYSTACKS, Haystacks, haystacks
from hf_posenc.evaluation.report import write

SMALL = Haystacks(queries=3, documents=4)
TASKS = tuple(HAYSTACKS)


@pytest.fixture(scope="module")
def tokenizer():
    return bytes_tokenizer()


@pytest.fixture(scope="module")
def text(tokenizer) -> list[Document]:
    return tokenized({"story": STORY}, tokenizer)


def encoder(length: int = 128):
    return tiny("bert", vocab_size=VOCAB, max_position_embeddings=length)


class Bags:
    """An embedder that counts words: it finds what shares most words with a query, and reads `limit` words."""

    pooling, model = "bags", tiny("bert")

    def __init__(self, tokenizer, limit=None):
        self.tokenizer, self.limit = tokenizer, limit

    def queries(self, texts):
        rows = torch.zeros(len(texts), 4096)
        for row, text in zip(rows, texts, strict=True):
            for word in text.replace("'s", "").replace("?", "").replace(",", "").split()[: self.limit]:
                row[sum(ord(c) * 31**i for i, c in enumerate(word)) % 4096] += 1
        return torch.nn.functional.normalize(rows, dim=-1)

    documents = queries


# ---------------------------------------------------------------- documents


@pytest.mark.parametrize("task", TASKS)
def test_documents_are_as_long_as_asked_and_hide_one_fact_each(task, tokenizer, text):
    made = haystacks(task, 400, tokenizer, Haystacks(queries=5, documents=20), text)
    assert len(made) == len({straw.text for straw in made}) == len({straw.query for straw in made}) == 20
    for straw in made:
        assert 400 - 32 <= straw.tokens == len(tokenizer(straw.text)["input_ids"]) <= 400
    depths = [straw.depth for straw in made]
    assert min(depths) < 0.3 and max(depths) > 0.7
    assert haystacks(task, 400, tokenizer, Haystacks(queries=5, documents=20), text) == made
    other = haystacks(task, 400, tokenizer, Haystacks(queries=5, documents=20, seed=1), text)
    assert other != made


def test_a_pass_key_stands_at_its_depth_and_only_there(tokenizer):
    made = haystacks("embed_passkey", 600, tokenizer, Haystacks(queries=1, documents=30))
    for straw in made:
        name = straw.query.removeprefix("What is the pass key for ").removesuffix("?")
        assert straw.text.count(f"{name}'s pass key is ") == 1
        where = straw.text.index(name) / (len(straw.text) - 90)  # what is hidden takes up to so much
        assert abs(where - straw.depth) < 0.1
        assert not any(name in other.text for other in made if other is not straw)


@pytest.mark.parametrize(
    "made, told",
    [
        (lambda: Haystacks(queries=0), "queries must be a whole number"),
        (lambda: Haystacks(queries=5, documents=4), "a document of its own"),
        (lambda: Haystacks(documents=10**6), "told apart"),
    ],
)
def test_impossible_numbers_are_refused(made, told):
    with pytest.raises(PosencError, match=told):
        made()


def test_text_that_is_missing_or_too_short_is_refused(tokenizer):
    with pytest.raises(PosencError, match="--text"):
        haystacks("embed_needle", 300, tokenizer, SMALL)
    with pytest.raises(PosencError, match="too short"):
        haystacks("embed_needle", 3000, tokenizer, SMALL, tokenized({"a": "only a few words"}, tokenizer))
    with pytest.raises(PosencError, match="room for 20"):
        haystacks("embed_passkey", 20, tokenizer, SMALL)


# ---------------------------------------------------------------- vectors


def test_mean_pooling_by_hand(tokenizer):
    model = encoder()
    ids = torch.tensor([tokenizer("On day 7")["input_ids"]])
    with torch.no_grad():
        wanted = model.bert(ids).last_hidden_state[0].mean(0)
    found = Pooled(model, tokenizer).queries(["On day 7"])[0]
    torch.testing.assert_close(found, wanted / wanted.norm(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "scheme, options", [(None, {}), ("learned", {"target_length": 512}), ("alibi", {}), ("t5", {})]
)
def test_neither_padding_nor_batches_matter(scheme, options, tokenizer):
    model = encoder() if scheme is None else patch_model(encoder(), scheme, **options)
    made = Pooled(model, tokenizer)
    texts = ["a", "On day 7 the cat went home.", "short one", STORY[:100]]
    alone = torch.cat([made.queries([text]) for text in texts])
    sizes = [len(text) for text in texts]
    for together in (1, 2, 4):
        found = embed(made.documents, texts, sizes, together, "cpu")
        torch.testing.assert_close(found, alone, atol=2e-6, rtol=1e-5)
    assert (alone @ alone.T)[0, 3] < 0.999


def test_a_table_that_ends_cuts_texts_there(tokenizer):
    made = Pooled(encoder(64), tokenizer)
    assert made.limit == 64
    assert torch.equal(made.queries([STORY[:300]]), made.queries([STORY[:64]]))
    far = Pooled(patch_model(encoder(64), "alibi"), tokenizer)
    assert far.limit is None
    assert not torch.allclose(far.queries([STORY[:300]]), far.queries([STORY[:64]]), atol=1e-3)


def test_an_encoder_with_a_decoder_is_refused(tokenizer):
    sizes = dict(d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16, decoder_ffn_dim=16)
    config = AutoConfig.for_model(
        "bart", vocab_size=VOCAB, encoder_attention_heads=2, decoder_attention_heads=2, **sizes
    )
    with pytest.raises(PosencError, match="encoder and a decoder"):
        Pooled(AutoModel.from_config(config), tokenizer)


def test_broken_vectors_are_refused():
    with pytest.raises(PosencError, match="1 of 2 embeddings"):
        embed(lambda texts: torch.tensor([[0.0], [math.nan]]), ["a", "b"], [1, 1], 2, "cpu")


# ---------------------------------------------------------------- pieces


@pytest.mark.parametrize("length", [16, 30, 64, 1000])
def test_pieces_hold_all_words_in_equal_parts(length, tokenizer):
    text = " ".join(STORY[:700].split())
    found = pieces(text, tokenizer, length)
    assert " ".join(found) == text
    sizes = [len(tokenizer(piece)["input_ids"]) for piece in found]
    assert max(sizes) <= length
    assert max(sizes) - min(sizes) <= 24  # no stub at the end: a word or two of difference


def test_chunked_is_the_mean_over_pieces_and_nothing_else_on_short_texts(tokenizer):
    whole = Pooled(encoder(64), tokenizer)
    made = Chunked(whole, 64)
    assert torch.allclose(made.documents(["On day 7"]), whole.documents(["On day 7"]), atol=1e-6)
    text = " ".join(STORY[:200].split())
    vectors = whole.documents(pieces(text, tokenizer, 64))
    assert len(vectors) == 4
    wanted = vectors.sum(0) / vectors.sum(0).norm()
    torch.testing.assert_close(made.documents([text])[0], wanted, atol=1e-6, rtol=1e-5)


# ---------------------------------------------------------------- scores


def test_ranks_by_hand():
    documents = torch.eye(3)
    queries = torch.tensor([[1.0, 0, 0], [0.6, 0.8, 0], [0.9, 0.3, 0.5]])
    assert own_ranks(queries, documents) == [1, 1, 2]
    assert own_ranks(torch.tensor([[0.5, 0.5, 0.0]]), documents) == [2]  # a draw is lost


@pytest.mark.parametrize("task", TASKS)
def test_who_reads_all_finds_all_and_who_reads_half_finds_half(task, tokenizer, text):
    asked = Haystacks(queries=40, documents=60)
    (row,) = embedding_retrieval(Bags(tokenizer), task, 700, asked=asked, documents=text)
    assert row.value > 0.9 and row.n == 40 and row.details["documents"] == 60
    words = min(len(s.text.split()) for s in haystacks(task, 700, tokenizer, asked, text)) // 2
    (half,) = embedding_retrieval(Bags(tokenizer, words), task, 700, asked=asked, documents=text)
    assert 0.25 < half.value < 0.75
    seen = [answer["rank"] == 1 for answer in half.details["answers"] if answer["depth"] < 0.35]
    lost = [answer["rank"] == 1 for answer in half.details["answers"] if answer["depth"] > 0.65]
    assert sum(seen) / len(seen) > 0.5 and sum(lost) / len(lost) < 0.2


def test_spearman_is_scipys():
    one, other = torch.randn(2, 40, generator=torch.Generator().manual_seed(0))
    other = one + other
    assert spearman(one, other) == pytest.approx(spearmanr(one.numpy(), other.numpy()).statistic)
    assert spearman(one, one) == pytest.approx(1) and spearman(one, -one) == pytest.approx(-1)


def test_similarity_rows_by_hand():
    before = torch.nn.functional.normalize(torch.randn(6, 8, generator=torch.Generator().manual_seed(0)), dim=-1)
    same = {row.metric: row for row in similarity_rows(before, before, "x", 32)}
    assert same["cosine"].value == pytest.approx(1) and same["rank_agreement"].value == pytest.approx(1)
    turned = before @ torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(1)))[0]
    moved = {row.metric: row for row in similarity_rows(before, turned, "x", 32)}
    assert moved["cosine"].value < 0.9  # all vectors turned alike: they moved, and kept their neighbours
    assert moved["rank_agreement"].value == pytest.approx(1)
    assert others(before)[2].tolist() == pytest.approx([float(before[2] @ before[i]) for i in (0, 1, 3, 4, 5)])


def test_passages_are_short_and_spread(tokenizer, text):
    found = passages(text, 48, tokenizer, 10)
    assert len(found) == len(set(found)) == 10
    assert all(24 <= len(tokenizer(passage)["input_ids"]) <= 48 for passage in found)
    assert STORY.startswith(found[0]) and STORY.rindex(found[-1]) > 0.95 * len(STORY)


# ---------------------------------------------------------------- runs


OPTIONS = Options(lengths=(128, 300), tasks=TASKS, haystacks=SMALL)


def test_compare_measures_every_scheme_and_leaves_the_model_as_it_was(tokenizer, text, tmp_path):
    model = encoder()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    given = dict(target_length=512, options=OPTIONS, out=tmp_path / "run.jsonl")
    schemes = "chunked,learned:resize=cyclic,learned:resize=linear,alibi"
    with pytest.warns(UserWarning, match="unpatched reads 128 tokens"):
        rows = compare(model, tokenizer, schemes, text, **given)
    assert not is_patched(model) and all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    labels = ["unpatched", "chunked", "learned:resize=cyclic", "learned:resize=linear", "alibi"]
    found = {(row.task, row.scheme, row.length, row.metric): row for row in rows}
    for label in labels:
        for task in TASKS:
            for length in (128, 300):
                row = found[task, label, length, "accuracy"]
                assert row.n == 3 and row.stderr > 0
                limit = {"unpatched": 128}.get(label, 512)
                assert max(row.details["read"]) == min(limit, max(row.details["tokens"]))
    tax = {label: found["similarity", label, 64, "cosine"].value for label in labels[1:]}
    assert tax["learned:resize=cyclic"] == pytest.approx(1, abs=1e-6) == tax["chunked"]
    assert tax["learned:resize=linear"] < 0.999 and tax["alibi"] < 0.999
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    (tmp_path / "run.jsonl").write_text("\n".join(lines[:-3]) + "\n")  # as if it had been interrupted
    with pytest.warns(UserWarning):
        assert compare(model, tokenizer, schemes, text, **given) == rows
    with pytest.raises(PosencError, match="another run"):
        compare(model, tokenizer, schemes, text, **{**given, "target_length": 600})
    for suffix in (".md", ".html"):
        file = tmp_path / f"report{suffix}"
        write(rows, file, {"model": "tiny", "trained_length": 128})
        said = file.read_text()
        assert all(word in said for word in ("Embed passkey", "Similarity", "learned:resize=cyclic", "Agresti"))


def test_evaluate_compares_short_texts_with_the_unpatched_model(tokenizer, text):
    model = patch_model(encoder(), "learned", target_length=512, resize="grouped")
    rows = evaluate(model, tokenizer, text, options=OPTIONS)
    assert {row.scheme for row in rows} == {"learned"} and is_patched(model)
    own = {(r.length, r.metric): r.value for r in rows if r.task == "similarity"}
    assert own and all(value < 0.999 for value in own.values())
    again = evaluate(model, tokenizer, text, options=OPTIONS, reference=encoder())
    assert own == pytest.approx({(r.length, r.metric): r.value for r in again if r.task == "similarity"}, abs=1e-6)
    bare = evaluate(encoder(512), tokenizer, text, options=OPTIONS)
    assert {row.task for row in bare} == set(TASKS)
    with pytest.raises(PosencError, match="not patched"):
        evaluate(encoder(512), tokenizer, text, options=OPTIONS, reference=encoder())


@pytest.mark.parametrize(
    "made, told",
    [
        (lambda t, d: Options(lengths=(64,), tasks=("embed_passkey", "perplexity")), "no model is made for both"),
        (lambda t, d: Options(lengths=(64,), tasks=("embed_passkeys",)), "did you mean 'embed_passkey'"),
        (lambda t, d: compare(tiny("llama", vocab_size=VOCAB), t, "chunked", d, target_length=64), "for decoders"),
        (lambda t, d: evaluate(encoder(), t, d, options=Options(lengths=(64,))), "embed_passkey,embed_needle"),
        (lambda t, d: compare(encoder(), t, "chunked:size=3", d, target_length=64, options=OPTIONS), "name=value"),
        (lambda t, d: compare(encoder(), t, "dca", d, target_length=512, options=OPTIONS), "dca: "),
        (lambda t, d: evaluate(encoder(), None, d, options=OPTIONS), "no tokenizer"),
    ],
)
def test_mistakes_are_answered_with_what_would_do(made, told, tokenizer, text):
    with pytest.raises(PosencError, match=f"(?i){told}"):
        made(tokenizer, text)


@pytest.mark.filterwarnings("ignore:unpatched reads 128 tokens")
def test_the_command_line(tokenizer, tmp_path):
    save(encoder(), tmp_path / "encoder")
    tokenizer.save_pretrained(tmp_path / "encoder")
    (tmp_path / "book.txt").write_text(STORY)
    asked = ["--tasks", "embed_passkey", "--queries", "2", "--documents", "3", "--json", str(tmp_path / "a.json")]
    done = CliRunner().invoke(app, ["eval", str(tmp_path / "encoder"), "--lengths", "128,256", *asked])
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "a.json").read_text())
    assert [(row["task"], row["length"], row["n"]) for row in rows] == [("embed_passkey", n, 2) for n in (128, 256)]
    given = ["--schemes", "chunked,learned:resize=cyclic", "--target-length", "256"]
    done = CliRunner().invoke(app, ["compare", str(tmp_path / "encoder"), *given, *asked])
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "a.json").read_text())
    assert {row["scheme"] for row in rows} == {"unpatched", "chunked", "learned:resize=cyclic"}
