"""SentenceTransformers: patched with their length and tokenizer, and back; saved right or refused; evaluated."""

import json
import os
import sys

import pytest
import torch
from cells import tiny
from evaluated import STORY, VOCAB, bytes_tokenizer
from huggingface_hub import ModelCard
from transformers import AutoModel, BertModel

from hf_posenc import (
    PosencError,
    UnsupportedModel,
    check_model,
    describe,
    is_patched,
    load,
    new_rows,
    patch_model,
    save,
    unpatch_model,
)
from hf_posenc.checkpoints.cards import is_ours
from hf_posenc.checkpoints.on_disk import describe_checkpoint, patch_checkpoint
from hf_posenc.evaluation import Options, evaluate, tokenized
from hf_posenc.evaluation.measures.embeddings import Pooled, embedder_of
from hf_posenc.evaluation.measures.haystacks import Haystacks
from hf_posenc.evaluation.suites.lemb import evaluate_lemb, measure_task, plan_lemb, task_names
from hf_posenc.patching.embedders import is_embedder

st = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed: an extra, 'embed'")
from sentence_transformers import SentenceTransformer  # noqa: E402
from sentence_transformers.base.modules import Transformer  # noqa: E402
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling  # noqa: E402

TRAINED, CUT, TARGET = 64, 48, 256
TEXTS = ["On day 7 the cat went home.", STORY[:200]]
"""One that any model reads, and one past the trained length."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> str:
    """A folder with a tiny BERT alone."""
    folder = tmp_path_factory.mktemp("bert")
    model = BertModel(tiny("bert", vocab_size=VOCAB, max_position_embeddings=TRAINED).config)
    with torch.no_grad():
        torch.manual_seed(0)
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    save(model, folder)
    tokenizer = bytes_tokenizer()
    tokenizer.model_max_length = CUT
    tokenizer.save_pretrained(folder)
    return str(folder)


def embedder(folder: str) -> SentenceTransformer:
    """As a user makes one, which cuts texts even before the model must."""
    model = SentenceTransformer(modules=[Transformer(folder), Pooling(32, "mean"), Normalize()], device="cpu")
    assert model.max_seq_length == CUT
    return model.eval()


def vectors(model) -> torch.Tensor:
    return model.encode(TEXTS, convert_to_tensor=True, show_progress_bar=False)


def test_patched_and_back_with_length_and_tokenizer(plain):
    model = embedder(plain)
    before, state = vectors(model), {k: v.clone() for k, v in model.state_dict().items()}
    assert not is_patched(model)
    assert patch_model(model, "learned", target_length=TARGET, resize="cyclic") is model
    assert is_patched(model) and is_patched(model[0].auto_model)
    assert model.max_seq_length == model.tokenizer.model_max_length == TARGET
    told = describe(model)
    assert (told.scheme, told.trained_length, told.target_length) == ("learned", TRAINED, TARGET)
    check_model(model)
    after = vectors(model)
    assert torch.equal(after[0], before[0]) and not torch.allclose(after[1], before[1], atol=1e-3)
    with torch.no_grad():  # the whole text is read: the mean over all its tokens
        states = model[0].auto_model(torch.tensor([model.tokenizer(TEXTS[1])["input_ids"]])).last_hidden_state[0]
    torch.testing.assert_close(after[1], states.mean(0) / states.mean(0).norm(), atol=1e-5, rtol=1e-4)
    patch_model(model, "alibi", target_length=2 * TARGET)  # anew, from the original
    assert model.max_seq_length == 2 * TARGET and describe(model).scheme == "alibi"
    assert unpatch_model(model) is model
    assert model.max_seq_length == model.tokenizer.model_max_length == CUT
    assert torch.equal(vectors(model), before)
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_a_scheme_that_is_not_told_how_far_leaves_the_length(plain):
    model = patch_model(embedder(plain), "alibi")
    assert model.max_seq_length == CUT
    model.max_seq_length = 1000  # by hand
    assert unpatch_model(model).max_seq_length == 1000


def test_whoever_patches_or_unpatches_the_model_inside_does_it_for_both(plain):
    model = patch_model(embedder(plain), "learned", target_length=TARGET)
    unpatch_model(model[0].auto_model)
    assert not is_patched(model) and model.max_seq_length == CUT


def test_a_refused_patch_leaves_all_as_it_was(plain):
    model = patch_model(embedder(plain), "learned", target_length=TARGET)
    before = vectors(model)
    with pytest.raises(PosencError):
        patch_model(model, "dca", target_length=2 * TARGET)
    with pytest.raises(PosencError, match="shorter than the trained"):
        patch_model(model, "learned", target_length=TRAINED // 2)
    assert model.max_seq_length == TARGET and torch.equal(vectors(model), before)
    unpatch_model(model)
    with pytest.raises(PosencError, match="not patched"):
        unpatch_model(model)


class Other(torch.nn.Module):
    """Somebody's own module."""


def test_what_is_no_embedder_of_one_model_is_refused(plain):
    assert not is_embedder(tiny("bert")) and not is_embedder(Other())
    with pytest.raises(UnsupportedModel, match="SentenceTransformer is wanted, got test_sentence_transformers"):
        patch_model(Other(), "alibi")
    two = embedder(plain)
    two[1].second = tiny("bert")
    with pytest.raises(UnsupportedModel, match="has 2 "):
        patch_model(two, "alibi")
    mute = embedder(plain)
    mute[0].processor = object()
    with pytest.raises(UnsupportedModel, match="no tokenizer"):
        patch_model(mute, "learned", target_length=TARGET)
    assert not is_patched(mute)


# ---------------------------------------------------------------- on disk


@pytest.mark.parametrize("scheme", ["learned", "sinusoidal", "alibi", "t5", "yarn"])
@pytest.mark.parametrize("way", ["save", "save_pretrained"])
def test_saved_right_or_refused(scheme, way, plain, tmp_path):
    model = patch_model(embedder(plain), scheme, target_length=TARGET)
    wanted = vectors(model)
    if way == "save":
        save(model, tmp_path / "saved")
    else:
        model.save_pretrained(str(tmp_path / "saved"))
    again = load(tmp_path / "saved")
    assert type(again) is SentenceTransformer and type(again[0]) is Transformer and not again.training
    assert again.max_seq_length == TARGET and describe(again).scheme == scheme
    assert torch.equal(vectors(again), wanted)
    assert describe_checkpoint(tmp_path / "saved")[0].scheme == scheme
    if scheme in ("learned", "sinusoidal"):
        strangers = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
        assert strangers.max_seq_length == TARGET and torch.equal(vectors(strangers), wanted)
    else:
        for kernel in ({}, {"attn_implementation": "sdpa"}, {"attn_implementation": "eager"}):
            with pytest.raises((ValueError, RuntimeError)):
                SentenceTransformer(str(tmp_path / "saved"), device="cpu", model_kwargs=kernel)
    if way == "save":
        card = ModelCard.load(tmp_path / "saved/README.md")  # the library's own, and what it does not know
        assert {"sentence-transformers", "hf-posenc", scheme} <= set(card.data.tags)
        assert ("Any sentence-transformers loads it right" in card.text) == (scheme in ("learned", "sinusoidal"))
        assert ("Only hf_posenc" in card.text) == (scheme not in ("learned", "sinusoidal"))
        assert "## Model Details" in card.text and is_ours(tmp_path / "saved/README.md")
    again.save_pretrained(str(tmp_path / "twice"))
    assert json.loads((tmp_path / "twice/modules.json").read_text()) == json.loads(
        (tmp_path / "saved/modules.json").read_text()
    )
    assert torch.equal(vectors(load(tmp_path / "twice")), wanted)


def test_portable_opens_with_trust_remote_code(plain, tmp_path):
    model = patch_model(embedder(plain), "alibi", target_length=TARGET)
    save(model, tmp_path / "saved", portable=True)
    again = SentenceTransformer(str(tmp_path / "saved"), device="cpu", trust_remote_code=True)
    assert torch.equal(vectors(again), vectors(model)) and is_patched(again)


def test_load_without_a_patch_and_without_the_modules_around(plain, tmp_path):
    model = embedder(plain)
    model.prompts["query"] = "ask: "
    model.save_pretrained(str(tmp_path / "saved"))
    again = load(tmp_path / "saved")
    assert torch.equal(vectors(again), vectors(model)) and not is_patched(again) and again.prompts["query"] == "ask: "
    assert type(load(tmp_path / "saved", model_class=AutoModel)) is BertModel
    assert type(load(plain)) is BertModel
    assert load(tmp_path / "saved", dtype=torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "written, told", [("{}", "damaged"), ('[{"idx": 0, "type": "their.Own", "path": ""}]', "'their.Own'")]
)
def test_modules_that_make_no_sense_are_refused(written, told, plain, tmp_path):
    embedder(plain).save_pretrained(str(tmp_path / "saved"))
    (tmp_path / "saved/modules.json").write_text(written)
    with pytest.raises(PosencError, match=told):
        load(tmp_path / "saved")


def test_without_the_library_the_message_says_what_to_install(plain, tmp_path, monkeypatch):
    embedder(plain).save_pretrained(str(tmp_path / "saved"))
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(PosencError, match=r"hf-posenc\[embed\]"):
        load(tmp_path / "saved")


@pytest.mark.parametrize("scheme, options", [("learned", {"resize": "cyclic"}), ("alibi", {})])
def test_patched_on_disk(scheme, options, plain, tmp_path):
    """Modules come along, and a maximum length from an older library does not cut what the patch reaches."""
    model = embedder(plain)
    model.save_pretrained(str(tmp_path / "saved"))
    config = tmp_path / "saved/sentence_bert_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_seq_length": CUT}))
    patch_checkpoint(tmp_path / "saved", tmp_path / "patched", scheme, target_length=TARGET, **options)
    again = load(tmp_path / "patched")
    patch_model(model, scheme, target_length=TARGET, **options)
    assert again.max_seq_length == TARGET and torch.equal(vectors(again), vectors(model))


# ---------------------------------------------------------------- evaluation


def test_evaluated_with_its_own_pooling_prompts_and_length(plain, tmp_path):
    model = embedder(plain)
    made = embedder_of(model, model.tokenizer)
    assert made.limit == CUT and "mean" in made.pooling
    mean = Pooled(model[0].auto_model, model.tokenizer)
    mean.limit = CUT
    torch.testing.assert_close(made.documents(TEXTS), mean.documents(TEXTS), atol=1e-6, rtol=1e-5)
    model.prompts["query"] = "ask: "
    assert not torch.allclose(made.queries(TEXTS), made.documents(TEXTS), atol=1e-3)
    model[1] = Pooling(32, "cls")
    assert not torch.allclose(made.documents(TEXTS), mean.documents(TEXTS), atol=1e-3)
    patch_model(model, "learned", target_length=TARGET)
    options = Options(lengths=(128,), tasks=("embed_passkey",), haystacks=Haystacks(queries=2, documents=3))
    rows = evaluate(model, model.tokenizer, tokenized({"story": STORY}, model.tokenizer), options=options)
    assert {row.task for row in rows} == {"embed_passkey", "similarity"}
    found = next(row for row in rows if row.task == "embed_passkey")
    assert found.scheme == "learned" and max(found.details["read"]) > TRAINED and "cls" in found.details["pooling"]
    with pytest.raises(PosencError, match="embed_passkey"):
        evaluate(model, model.tokenizer, options=Options(lengths=(64,)))
    assert model.max_seq_length == TARGET and new_rows(model)


@pytest.mark.slow
def test_longembed_offline_says_what_would_do(plain):
    pytest.importorskip("mteb", reason="mteb is not installed: an extra, 'embed'")
    model = embedder(plain)
    assert len(task_names("lemb")) == 6
    with pytest.raises(PosencError, match=r"(?i)did you mean 'LEMBNeedleRetrieval'"):
        task_names("LEMBNeedlRetrieval")
    with pytest.raises(PosencError, match="no length 300"):
        plan_lemb(model, model.tokenizer, "lemb", [300])
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        with pytest.raises(PosencError, match=r"cannot be reached .*embed_passkey"):
            evaluate_lemb(model, model.tokenizer, "LEMBPasskeyRetrieval", [256])


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", [True, False])
def test_mteb_scores_what_the_model_embeds(wrapped, plain):
    """A task of MTEB's own, made in memory: each document is its query, and must be found."""
    mteb_tasks = pytest.importorskip("mteb.mocks.mock_tasks", reason="mteb is not installed: an extra, 'embed'")
    model = embedder(plain) if wrapped else load(plain)
    task = mteb_tasks.MockRetrievalTask()
    task.load_data()
    (subset,) = task.dataset
    data = task.dataset[subset]["test"]
    pairs = dict(zip(data["corpus"]["id"], data["queries"]["id"], strict=True))
    texts = dict(zip(data["queries"]["id"], data["queries"]["text"], strict=True))
    data["corpus"] = data["corpus"].map(lambda row: {"text": texts[pairs[row["id"]]], "title": ""})
    data["relevant_docs"] = {query: {document: 1} for document, query in pairs.items()}
    row = measure_task(model, bytes_tokenizer(), task, "test", 32, "unpatched")
    assert (row.protocol, row.length, row.value, row.n) == ("mteb", 32, 1.0, 2)
    assert row.details["read"] == 32
    if wrapped:
        assert model.max_seq_length == CUT
