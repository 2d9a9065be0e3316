"""Whole runs: what they return, write, refuse and go on with; `compare`; the command line."""

import json
import os
import time
from pathlib import Path

import pytest
import torch
from cells import tiny
from evaluated import STORY, bytes_tokenizer, document, reader
from forked import command, fork
from transformers import AutoModel
from typer.testing import CliRunner

from hf_posenc import PosencError, describe, is_patched, load, patch_model, save
from hf_posenc.cli.main import app
from hf_posenc.evaluation import Options, Reading, Retrieval, Row, compare, evaluate, parsed_schemes, standings
from hf_posenc.evaluation.runs.budget import available_memory, estimate
from hf_posenc.evaluation.runs.results import model_digest

ROOT = Path(__file__).parent.parent
SMALL = Options(lengths=(48, 96), reading=Reading(windows=4, scored=8))


@pytest.fixture(scope="module")
def tokenizer():
    return bytes_tokenizer()


@pytest.fixture
def text():
    return [document(400, vocab=250)]


def figures(rows, **wanted):
    return {row.length: row.value for row in rows if all(getattr(row, k) == v for k, v in wanted.items())}


def test_a_patched_model_is_taxed_against_itself_unpatched(tokenizer, text):
    model = patch_model(reader(), "linear", factor=4.0)
    rows = evaluate(model, tokenizer, text, options=SMALL)
    assert is_patched(model)
    plain = evaluate(reader(), tokenizer, text, options=SMALL)
    assert not [row for row in plain if row.task == "tax"]
    losses = figures(rows, task="perplexity", metric="loss", scheme="linear")
    unpatched = figures(rows, task="perplexity", metric="loss", scheme="unpatched")
    assert set(losses) == {16, 32, 48, 96} and set(unpatched) == {16, 32}  # trained at 32
    taxes = figures(rows, task="tax", scheme="linear")
    assert taxes == {n: pytest.approx(losses[n] - unpatched[n], abs=1e-9) for n in (16, 32)}
    again = evaluate(model, tokenizer, text, options=SMALL)
    assert again == rows  # the patch came back exactly
    assert all(json.loads(json.dumps(row.to_dict())) == row.to_dict() for row in rows)


def test_curves_are_measured_before_and_after(tokenizer, text):
    curves = ("loss_by_position", "shift")
    asked = Options(lengths=(48, 96), tasks=curves, reading=Reading(windows=4, scored=8))
    rows = evaluate(patch_model(reader(), "yarn", factor=4.0), tokenizer, text, options=asked)
    assert {(row.task, row.scheme) for row in rows if row.task in curves} == {
        (task, scheme) for task in curves for scheme in ("yarn", "unpatched")
    }
    plain = evaluate(reader(), tokenizer, text, options=asked)
    assert [row for row in rows if row.task in curves and row.scheme == "unpatched"] == plain


def test_where_the_patch_cannot_be_undone_a_reference_serves(tokenizer, text, tmp_path):
    save(patch_model(reader("gpt2"), "sinusoidal"), tmp_path / "gpt2")
    model = load(tmp_path / "gpt2")
    with pytest.warns(UserWarning, match=r"tax was not measured: .*--reference"):
        rows = evaluate(model, tokenizer, text, options=SMALL)
    assert not [row for row in rows if row.task == "tax"]
    rows = evaluate(model, tokenizer, text, options=SMALL, reference=reader("gpt2"))
    assert set(figures(rows, task="tax")) == {16, 32}


def test_an_adapter_is_taxed_against_its_base(tokenizer, text):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    base = evaluate(reader(), tokenizer, text, options=Options(**{**vars(SMALL), "lengths": (32, 96)}))
    model = peft.get_peft_model(patch_model(reader(), "linear", factor=4.0), lora)
    rows = evaluate(model, tokenizer, text, options=SMALL)
    found = figures(rows, task="perplexity", metric="loss", scheme="unpatched")[32]
    assert found == pytest.approx(figures(base, metric="loss")[32], abs=1e-5)


def test_compare_gives_the_model_back_to_the_bit(tokenizer, text):
    model = reader()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    config = model.config.to_dict()
    rows = compare(model, tokenizer, "linear,yarn:beta_fast=16,none,t5", text, target_length=128, options=SMALL)
    assert not is_patched(model) and model.config.to_dict() == config
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    schemes = list(dict.fromkeys(row.scheme for row in rows))
    assert schemes == ["unpatched", "linear", "yarn:beta_fast=16", "none", "t5"]
    alone = patch_model(reader(), "yarn", target_length=128, beta_fast=16)
    expected = figures(
        evaluate(alone, tokenizer, text, options=SMALL), metric="loss", scheme="yarn", task="perplexity"
    )
    assert figures(rows, metric="loss", scheme="yarn:beta_fast=16", task="perplexity") == expected
    assert {row.scheme for row in rows if row.task == "tax"} == set(schemes) - {"unpatched"}


def test_a_scheme_that_ends_is_left_out_where_it_ends(tokenizer, text):
    with pytest.warns(UserWarning, match=r"unpatched has 32 positions and is not measured at \[48, 96\]"):
        rows = compare(reader("gpt2"), tokenizer, "alibi", text, target_length=128, options=SMALL)
    assert set(figures(rows, scheme="unpatched")) == {16, 32}
    assert set(figures(rows, scheme="alibi", metric="loss")) == {16, 32, 48, 96}
    with pytest.raises(PosencError, match="table of 32 positions and cannot read 96"):
        evaluate(reader("gpt2"), tokenizer, text, options=SMALL)


def test_schemes_with_options():
    entries = parsed_schemes("none, yarn:factor=4,beta_fast=16, ntk:alpha=cover")
    assert [(e.label, e.scheme, e.options) for e in entries] == [
        ("none", "none", {}),
        ("yarn:factor=4,beta_fast=16", "yarn", {"factor": 4, "beta_fast": 16}),
        ("ntk:alpha=cover", "ntk", {"alpha": "cover"}),
    ]
    for wrong, told in (
        ("yarm", "Did you mean 'yarn'"),
        ("yarn,yarn", "once"),
        ("", "once"),
        ("yarn:4", "name=value"),
    ):
        with pytest.raises(PosencError, match=told):
            parsed_schemes(wrong)


def row(scheme, losses):
    common = {"task": "perplexity", "protocol": "last", "length": 64, "metric": "loss", "stderr": 0.1}
    value = sum(losses) / len(losses)
    return Row(**common, scheme=scheme, value=value, n=len(losses), details={"losses": losses})


def test_what_errors_do_not_separate_shares_a_rank():
    noise = torch.randn(40, generator=torch.Generator().manual_seed(0)).tolist()
    near = [x + 0.01 * y for x, y in zip(noise, noise[1:] + noise[:1], strict=True)]
    far = [x + 1 for x in near]
    found = {s.scheme: s for s in standings([row("far", far), row("a", noise), row("near", near)])}
    assert {name: (s.rank, s.lowest) for name, s in found.items()} == {"a": (1, 2), "near": (1, 2), "far": (3, 3)}
    assert found["a"].tied == ("near",) and found["far"].tied == ()


def test_many_pairs_need_a_wider_gap():
    """A gap of 2.6 standard errors parts two schemes (t is 2.0), but not two of six (t is 3.1)."""
    noise = torch.randn(40, generator=torch.Generator().manual_seed(0)).tolist()
    gap = torch.randn(40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gap = (gap - gap.mean()) / (gap.std() / 40**0.5) + 2.6  # its mean is 2.6 of its standard errors
    second = [x + y for x, y in zip(noise, gap.tolist(), strict=True)]
    rows = [row("a", noise), row("b", second)]
    assert [s.rank for s in standings(rows)] == [1, 2]
    more = [row(name, [x + 1000 * i for x in noise]) for i, name in enumerate("cdef", 1)]
    assert [s.rank for s in standings([*rows, *more])][:2] == [1, 1]


def test_a_run_goes_on_where_it_stopped_and_only_the_same(tokenizer, text, tmp_path, monkeypatch):
    out = tmp_path / "run.jsonl"
    rows = evaluate(reader(), tokenizer, text, options=SMALL, out=out)
    lines = out.read_text().splitlines(keepends=True)
    assert len(lines) == 3  # what the run is, and a job for each length
    out.write_text("".join(lines[:2]) + lines[2][:40])  # killed while it wrote
    assert evaluate(reader(), tokenizer, text, options=SMALL, out=out) == rows
    assert out.read_text().splitlines(keepends=True) == lines
    faster = Options(**{**vars(SMALL), "reading": Reading(windows=4, scored=8, batch_size=1)})
    assert evaluate(reader(), tokenizer, text, options=faster, out=out) == rows
    other = [document(400, vocab=250, seed=9)]
    longer = Options(lengths=(48, 96), reading=Reading(windows=5, scored=8))
    changes = [("model", reader(seed=1), text, SMALL), ("text", reader(), other, SMALL)]
    for what, model, documents, options in [*changes, ("options", reader(), text, longer)]:
        with pytest.raises(PosencError, match=f"another run: {what} changed"):
            evaluate(model, tokenizer, documents, options=options, out=out)
    out.write_text("something else\n")
    with pytest.raises(PosencError, match="damaged at line 1"):
        evaluate(reader(), tokenizer, text, options=SMALL, out=out)


def test_a_trained_step_is_another_model():
    model = reader()
    before = model_digest(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1e-4)
    assert model_digest(model) != before
    assert model_digest(reader()) == before != model_digest(patch_model(reader(), "linear", factor=2.0))


def test_lengths_beyond_memory_are_refused_with_the_estimate(tokenizer):
    text, reading = [document(10_000, vocab=250)], Reading(windows=1, scored=8, batch_size=10**9)
    options = Options(lengths=(9_000,), reading=reading)
    with pytest.raises(PosencError, match=r"needs about \d+\.\d\d GB for .* are free.*--force"):
        evaluate(reader(), tokenizer, text, options=options)
    few = Options(lengths=(64,), reading=reading)
    assert evaluate(reader(), tokenizer, text, options=few, force=True)
    assert available_memory(torch.device("cpu")) > 2**20


def test_the_estimate_grows_with_what_it_counts():
    model = tiny("llama")
    small = estimate(model, 1, 1000, 512)
    assert estimate(model, 2, 1000, 512).states == 2 * small.states
    assert small.logits == 512 * 97 * 8 and small.cache == 0
    assert estimate(model, 1, 1000, 512, cached=True).cache == 2 * 2 * 1000 * 2 * 8 * 4
    assert estimate(tiny("gpt2"), 1, 1000, 512).total > 0


def test_what_cannot_be_measured_is_refused(tokenizer, text):
    with pytest.raises(PosencError, match="no tokenizer"):
        evaluate(reader(), None, text, options=SMALL)
    with pytest.raises(PosencError, match="encoder"):
        evaluate(reader("bert", max_position_embeddings=128), tokenizer, text, options=SMALL)
    with pytest.raises(PosencError, match=r"makes token \d+ .* knows 97"):
        evaluate(tiny("llama"), tokenizer, text, options=SMALL)
    with pytest.raises(PosencError, match="none was given"):
        evaluate(reader(), tokenizer, options=SMALL)
    with pytest.raises(PosencError, match="Did you mean 'passkey'"):
        Options(lengths=(64,), tasks=("passkeys",))
    with pytest.raises(PosencError, match="unpatched model"):
        compare(patch_model(reader(), "alibi"), tokenizer, "none", text, target_length=64)


# --- the command line


ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def run(*arguments):
    """A command, in this process: starting another takes seconds."""
    done = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    """A checkpoint, a patched one, one without a tokenizer, an encoder, and a text."""
    root = tmp_path_factory.mktemp("models")
    for name, model in {
        "plain": reader(),
        "patched": patch_model(reader(), "yarn", factor=8.0),
        "mute": reader(),
        "encoder": AutoModel.from_config(reader("bert").config),
    }.items():
        save(model, root / name)
        if name != "mute":
            tokenizer.save_pretrained(root / name)
    (root / "book.txt").write_text(STORY)
    return root


def test_eval_prints_and_writes(folder, tmp_path):
    given = ["--lengths", "400,600", "--text", folder / "book.txt", "--windows", 3, "--scored", 8, "--trials", 1]
    tasks = ["--tasks", "perplexity,passkey", "--depths", "0,1", "--distractors", 2]
    done = run(
        "eval", folder / "patched", *given, *tasks, "--json", tmp_path / "a.json", "--report", tmp_path / "a.md"
    )
    assert done.exit_code == 0, done.stderr
    rows = [Row.from_dict(data) for data in json.loads((tmp_path / "a.json").read_text())]
    found = {(row.task, row.protocol, row.scheme, row.length) for row in rows}
    assert {
        ("perplexity", "last", "yarn", 600),
        ("passkey", "generation", "yarn", 600),
        ("tax", "last", "yarn", 32),
    } <= found
    for one in rows:
        assert f"{one.value:.4f}" in done.stdout
    assert "yarn" in (tmp_path / "a.md").read_text()


def test_compare_prints_ranks(folder, tmp_path):
    given = ["--target-length", 64, "--text", folder / "book.txt", "--windows", 3, "--scored", 8]
    done = run(
        "compare", folder / "plain", "--schemes", "none,yarn:beta_fast=16", *given, "--json", tmp_path / "a.json"
    )
    assert done.exit_code == 0, done.stderr
    rows = json.loads((tmp_path / "a.json").read_text())
    assert {row["length"] for row in rows} == {16, 32, 64}
    assert set(rows[0]) == {"task", "protocol", "scheme", "length", "metric", "value", "stderr", "n", "details"}
    assert all(name in done.stdout for name in ("unpatched", "none", "yarn:beta_fast=16", "tax", "(1"))


@pytest.mark.parametrize(
    "name, more, told",
    [
        ("mute", [], "no tokenizer"),
        ("encoder", [], "embed_passkey"),
        ("plain", ["--protocol", "yarm"], "Did you mean 'yarn'"),
        ("plain", ["--lengths", "1m"], "1048576 tokens are needed"),
        ("plain", ["--report", "a.pdf"], ".html"),
        ("plain", ["--dtype", "float12"], "Did you mean"),
        ("plain", ["--device", "nowhere"], "cannot be put on"),
        ("nothing", [], "nothing"),
    ],
)
def test_mistakes_are_answered_plainly(folder, name, more, told):
    done = run(
        "eval",
        folder / name,
        "--text",
        folder / "book.txt",
        *(more if "--lengths" in more else ["--lengths", "64", *more]),
    )
    assert done.exit_code == 2
    assert told in done.stderr


def test_a_killed_run_goes_on(folder, tmp_path):
    out = tmp_path / "run.jsonl"
    given = ["eval", folder / "plain", "--text", folder / "book.txt", "--lengths", "128,256,512,1k,1500"]
    given += ["--protocol", "sliding", "--max-tokens", "2k", "--batch-size", 1, "--stride", 64]
    process = fork(command(*given, "--out", out))
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and (not out.exists() or out.read_bytes().count(b"\n") < 3):
        time.sleep(0.02)
    process.kill()
    process.join()
    before = out.read_bytes()
    kept = before[: before.rfind(b"\n") + 1]
    assert 3 <= kept.count(b"\n") < 6  # killed in the middle
    done = run(*given, "--out", out, "--json", tmp_path / "a.json")
    assert done.exit_code == 0, done.stderr
    assert out.read_bytes().startswith(kept) and out.read_bytes().count(b"\n") == 6
    fresh = run(*given, "--json", tmp_path / "b.json")
    assert fresh.exit_code == 0 and (tmp_path / "a.json").read_text() == (tmp_path / "b.json").read_text()
    other = run(*given[:-1], 32, "--out", out)
    assert other.exit_code == 2 and "options changed" in other.stderr


def test_retrieval_needs_no_text(tokenizer):
    asked = Retrieval(trials=1, depths=(0.5,), distractors=2)
    rows = evaluate(reader(), tokenizer, options=Options(lengths=(600,), tasks=("passkey",), asked=asked))
    assert [row.protocol for row in rows] == ["likelihood", "generation"]
    assert describe(reader()).trained_length == 32
