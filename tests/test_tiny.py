"""The carried model is real in miniature. Fewer windows and trials than in its card, and bars with room for that."""

import importlib.util
import json
import os
import re
from itertools import islice, pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_posenc import PosencError, patch_model, unpatch_model
from hf_posenc.evaluation import Reading, Retrieval, Row, tokenized
from hf_posenc.evaluation.measures.perplexity import perplexity
from hf_posenc.evaluation.measures.retrieval import retrieval
from hf_posenc.models import NAMES, model_path
from hf_posenc.training.stdlib import stdlib_texts

TOOLS = Path(__file__).parent.parent / "tools"
SETTINGS = TOOLS / "pretrain_tiny.yaml"
LENGTHS = (256, 512, 1024)


def script(name):
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def recipe():
    return script("pretrain_tiny")


@pytest.fixture(scope="module")
def tiny():
    return AutoModelForCausalLM.from_pretrained(model_path("tiny"), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(model_path("tiny"))


@pytest.fixture(scope="module")
def documents(tokenizer):
    found = tokenized(stdlib_texts(held_out=True), tokenizer)
    return [document for document in found if len(document.ids) >= 4096]


def read(model, tokenizer, documents, length):
    reading, bos = Reading(windows=24), tokenizer.bos_token_id
    rows = perplexity(model, documents, length, longest=max(LENGTHS), reading=reading, bos=bos)
    return next(row.value for row in rows if row.metric == "perplexity")


def written(model, tokenizer, length, trials=6, depths=(0.0, 0.25, 0.5, 0.75, 1.0)):
    asked = Retrieval(trials=trials, distractors=1, depths=depths)
    rows = retrieval(model, tokenizer, "passkey", length, asked=asked)
    shares = [row.value for row in rows if row.protocol == "generation"]
    return sum(shares) / len(shares)


def test_it_reads_inside_its_length_and_not_beyond(tiny, tokenizer, documents):
    inside, twice = read(tiny, tokenizer, documents, 256), read(tiny, tokenizer, documents, 512)
    assert inside <= 11
    assert twice >= 2 * inside


def test_it_finds_passkeys_inside_its_length_and_not_beyond(tiny, tokenizer):
    assert written(tiny, tokenizer, 256) >= 0.95
    assert written(tiny, tokenizer, 512) <= 0.2
    assert written(tiny, tokenizer, 1024, trials=2) <= 0.1


def test_yarn_carries_it_four_times_as_far(tiny, documents, tokenizer):
    inside = read(tiny, tokenizer, documents, 256)
    patch_model(tiny, "yarn", target_length=1280)
    try:
        assert read(tiny, tokenizer, documents, 1024) <= 1.15 * inside
    finally:
        unpatch_model(tiny)


def test_it_is_as_small_as_promised_and_carries_nothing_that_runs():
    folder = Path(model_path("tiny"))
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 6_000_000
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"} <= names
    assert not [name for name in names if name.endswith((".py", ".bin", ".pt", ".pkl"))]
    assert not any("/" in word for word in re.findall(r"(?<= )/[^ ]*", (folder / "README.md").read_text()))


def test_its_sizes_are_those_of_a_llama_that_reads_256_tokens(tiny):
    assert type(tiny).__name__ == "LlamaForCausalLM"
    assert sum(p.numel() for p in tiny.parameters()) <= 3_000_000
    assert tiny.config.max_position_embeddings == 256
    assert tiny.config.vocab_size == tiny.get_input_embeddings().num_embeddings


def test_its_tokenizer_is_fast_spells_digits_and_loses_nothing(tokenizer):
    assert tokenizer.is_fast
    assert tokenizer("x = 90210")["input_ids"][0] == tokenizer.bos_token_id
    assert [tokenizer.decode([token]) for token in tokenizer("x = 90210")["input_ids"]][-5:] == list("90210")
    text = "def naïve(x):\n\treturn x  # 日本 😀\r\n" + " " * 7
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    assert tokenizer.eos_token_id not in tokenizer(text)["input_ids"]
    assert len({tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}) == 3


def test_carried_models_are_known_by_name():
    assert NAMES == ("tiny",)
    assert os.path.isfile(os.path.join(model_path("tiny"), "model.safetensors"))
    assert model_path("somebody/tiny") == "somebody/tiny"


def few_texts(held_out=False):
    """A tokenizer for all of them takes longer to make than a model does to train for two steps."""
    return dict(islice(stdlib_texts(held_out).items(), 40))


def test_the_recipe_trains_and_what_it_saves_loads(recipe, tmp_path, monkeypatch):
    sizes = ["--watch", "2", "steps=2", "vocab_size=512", "hidden_size=32", "num_hidden_layers=1"]
    monkeypatch.setattr("sys.argv", ["pretrain_tiny.py", str(SETTINGS), "--out", str(tmp_path / "made"), *sizes])
    monkeypatch.setattr(recipe, "stdlib_texts", few_texts)
    recipe.main()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    made = AutoTokenizer.from_pretrained(tmp_path / "made")
    assert (model.config.vocab_size, model.config.hidden_size, model.dtype) == (512, 32, torch.float16)
    assert made("90")["input_ids"] == made("9")["input_ids"] + made("0")["input_ids"][1:]
    assert json.loads((tmp_path / "made" / "training.json").read_text())["steps"] == 2


def test_the_recipe_refuses_settings_that_it_does_not_know(recipe):
    for override, said in {
        "step=2": "unknown key 'step'. Did you mean 'steps'",
        "steps": "write key=value",
        "steps=many": "steps: Input should be a valid integer",
        "stages=[{lenght: 3}]": "unknown key 'stages.0.lenght'. Did you mean 'length'",
    }.items():
        with pytest.raises(PosencError, match=re.escape(said)):
            recipe.settings_of(str(SETTINGS), [override])


def test_muon_is_torchs_own_but_for_the_precision(recipe):
    torch.manual_seed(0)
    shapes = [(24, 16), (16, 24), (24, 16)]
    ours, theirs = ([torch.nn.Parameter(torch.ones(shape)) for shape in shapes] for _ in range(2))
    pair = recipe.Muon(ours, lr=0.02, momentum=0.95), torch.optim.Muon(theirs, lr=0.02, weight_decay=0.0)
    for _ in range(3):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn(mine.shape)
            other.grad = mine.grad.clone()
        for optimizer in pair:
            optimizer.step()
    for mine, other in zip(ours, theirs, strict=True):
        moved, away = (mine - 1).norm(), (mine - other).norm()
        assert away < 0.02 * moved


@pytest.fixture(scope="module")
def reader(recipe, tokenizer):
    settings = recipe.settings_of(str(SETTINGS))
    return recipe.Reader(settings, tokenizer, ["x = 1\n" * 4000])


def test_positions_of_short_rows_leap_up_to_the_full_length_and_never_past_it(reader):
    for stage in reader.settings.stages:
        rows = [reader.positions(stage) for _ in range(400)]
        steps = [[b - a for a, b in pairwise(row)] for row in rows]
        assert all(len(row) == stage.length and row[0] == 0 and row[-1] < 256 for row in rows)
        assert all(min(row) == 1 and sum(step > 1 for step in row) <= stage.leaps for row in steps)
        assert max(row[-1] for row in rows) > 240 and (stage.leaps == 0) == all(max(row) == 1 for row in steps)


def test_rows_of_every_kind_open_as_the_tokenizer_opens_a_text(reader):
    for kind in ("passkey", "pairs", "repeats", "text"):
        shares = {} if kind == "text" else {kind: 1.0}
        stage = type(reader.settings.stages[0])(share=1.0, length=128, tokens=128, **shares)
        settings = reader.settings.model_copy(update={"weights": {kind: (0.5, 5.0)}})
        reader_of_kind = type(reader)(settings, reader.tokenizer, reader.texts)
        ids, weights = reader_of_kind.row(stage)
        assert len(ids) == len(weights) == 128
        assert ids[0] == reader.tokenizer.bos_token_id and ids.count(ids[0]) == 1


def test_a_token_after_a_leap_still_sees_what_stands_before_it(recipe, tiny):
    torch.manual_seed(0)
    ids, positions = torch.randint(3, 700, (2, 32)), torch.arange(32) + 90 * (torch.arange(32) > 15)
    last = torch.zeros(2, 32).index_fill(1, torch.tensor([31]), 1.0)
    other = ids.clone()
    other[:, :8] = torch.randint(3, 700, (2, 8))
    with torch.no_grad():
        told, elsewhere = (recipe.loss_of(tiny, row, last, positions.expand(2, -1)) for row in (ids, other))
        mask = torch.full((32, 32), -torch.inf).triu(1).expand(2, 1, 32, 32)
        logits = tiny(input_ids=ids, attention_mask=mask, position_ids=positions.expand(2, -1)).logits
    expected = torch.nn.functional.cross_entropy(logits[:, -2], ids[:, -1])
    torch.testing.assert_close(told, expected, atol=1e-4, rtol=1e-4)
    assert told != elsewhere


def test_stages_follow_each_other_by_their_shares_and_rates_end_at_nothing(recipe):
    settings = recipe.settings_of(str(SETTINGS), ["steps=1000", "warmup=10", "decay=0.5"])
    lengths = [recipe.stage_at(step, settings).length for step in range(1000)]
    assert lengths == sorted(lengths) and set(lengths) == {64, 128, 256}
    total = sum(stage.share for stage in settings.stages)
    assert abs(lengths.count(64) - 1000 * settings.stages[0].share / total) <= 1
    rates = [recipe.rate(step, settings) for step in range(1000)]
    assert rates[0] == 0.1 and rates[9:500] == [1.0] * 491 and 0 < rates[-1] < 0.003


def test_scores_are_held_against_their_bars():
    score = script("score_tiny")

    def row(task, protocol, length, metric, value, scheme="unpatched"):
        return Row(
            task=task, protocol=protocol, scheme=scheme, length=length, metric=metric, value=value, stderr=None, n=1
        )  # fmt: skip

    rows = [row("perplexity", "last", n, "loss", loss) for n, loss in ((256, 2.0), (512, 3.0), (1024, 3.0))]
    rows += [row("passkey", "generation", n, "accuracy", v) for n in (256, 512, 1024) for v in (1.0, 0.5)]
    rows += [row("passkey", "likelihood", 256, "accuracy", 0.0)]
    figures = score.figures_of(rows)
    assert figures["unpatched", 256] == (pytest.approx(7.389, abs=1e-3), 0.75)
    missed = [what for what, value, sign, limit in score.bars(figures) if not score.is_met(value, sign, limit)]
    assert missed == ["passkeys at 256", "passkeys at 512", "passkeys at 1024"]
