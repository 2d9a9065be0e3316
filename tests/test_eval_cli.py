"""Evaluation as a user meets it: `hf-posenc eval` and `compare`, their refusals and their interruptions."""

import json
import logging
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from evaluated import STORY, bytes_tokenizer, reader
from forked import command, fork
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForMaskedLM
from typer.testing import CliRunner

from hf_posenc import PosencError, load, patch_model, save
from hf_posenc.cli import run_evaluation as commands
from hf_posenc.cli.main import app
from hf_posenc.evaluation import Options, evaluate, read_documents
from hf_posenc.evaluation.runs import decoders

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200", "NO_COLOR": "1"}
SMALL = ("--windows", 3, "--scored", 8)
PATTERNS = {
    "self_extend": {"target_length": 64},
    "rerope": {"target_length": 64},
    "dca": {"target_length": 64},
    "streaming": {"target_length": 64},
    "lm_infinite": {"target_length": 64},
    "window": {"target_length": 64, "window": 16},
}


def run(*arguments):
    """A command, in this process; an exception that is no exit would be a traceback on the user's screen."""
    done = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert done.exception is None or isinstance(done.exception, SystemExit), repr(done.exception)
    return done


def rows_of(path: Path) -> dict[tuple, float]:
    keys = ("task", "protocol", "scheme", "length", "metric")
    return {tuple(row[key] for key in keys): row["value"] for row in json.loads(path.read_text())}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Checkpoints, an adapter on a patched one, and texts."""
    root = tmp_path_factory.mktemp("models")
    encoder = AutoModelForMaskedLM.from_config(reader("bert", initializer_range=0.02).config)
    models = {
        "plain": reader(),
        "patched": patch_model(reader(), "yarn", factor=4.0),
        "table": reader("gpt2"),
        "encoder": encoder,
        "long": reader(max_position_embeddings=131072),
        **{name: patch_model(reader(), name, **options) for name, options in PATTERNS.items()},
    }
    for name, model in models.items():
        save(model, root / name)
        bytes_tokenizer().save_pretrained(root / name)
    adapted = load(root / "patched")
    lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(3)
    save(get_peft_model(adapted, lora), root / "adapter")
    (root / "book.txt").write_text(STORY)
    (root / "other.txt").write_text(STORY[::-1])
    return root


@pytest.fixture
def asked(folder, tmp_path):
    """Runs `eval` or `compare` of a model on the book, with small windows; returns the result and its rows."""

    def ask(command, name, *more, text="book.txt"):
        file = tmp_path / f"{name}.json"
        done = run(command, folder / name, "--text", folder / text, *SMALL, "--json", file, *more)
        return done, rows_of(file) if file.exists() else None

    return ask


def plain_loss(model, folder: Path, length: int) -> float:
    """`last` with three windows of eight tokens, as one loop over plain logits."""
    ids = torch.tensor(bytes_tokenizer()((folder / "book.txt").read_text())["input_ids"])
    longest, losses = max(length, 32), []
    for i in range(3):
        end = longest + (len(ids) - longest) * i // 2
        window = ids[end - length : end][None]
        with torch.no_grad():
            logits = model(window).logits.float()
        losses.append(torch.nn.functional.cross_entropy(logits[0, -9:-1], window[0, -8:]))
    return float(torch.stack(losses).mean())


# What is measured


def test_an_adapter_on_a_patched_base_is_read_as_it_is(asked, folder):
    done, rows = asked("eval", "adapter", "--lengths", 64)
    assert done.exit_code == 0, done.stderr
    value = rows["perplexity", "last", "yarn", 64, "loss"]
    assert value == pytest.approx(plain_loss(load(folder / "adapter").eval(), folder, 64), abs=1e-4)
    assert abs(value - plain_loss(load(folder / "patched").eval(), folder, 64)) > 1e-3
    unpatched = rows["perplexity", "last", "unpatched", 32, "loss"]
    assert rows["tax", "last", "yarn", 32, "loss"] == pytest.approx(
        rows["perplexity", "last", "yarn", 32, "loss"] - unpatched, abs=1e-6
    )


def test_bfloat16_is_what_is_measured(asked, folder):
    done, rows = asked("eval", "plain", "--lengths", 32, "--dtype", "bfloat16")
    assert done.exit_code == 0, done.stderr
    value = rows["perplexity", "last", "unpatched", 32, "loss"]
    exact = plain_loss(load(folder / "plain", dtype=torch.float32).eval(), folder, 32)
    assert value != pytest.approx(exact, abs=1e-6) and value == pytest.approx(exact, rel=0.05)


def test_a_model_that_is_shared_out_among_devices_gives_the_same(asked):
    """Here all of it goes to the CPU, which is what there is."""
    done, rows = asked("eval", "plain", "--lengths", 64, "--device-map", "auto", "--dtype", "float32")
    assert done.exit_code == 0, done.stderr
    assert "Measuring on auto" in done.stderr
    assert rows == asked("eval", "plain", "--lengths", 64, "--device", "cpu")[1]


def test_compare_measures_patterns_as_eval_does_their_checkpoints(asked, folder):
    named = ",".join(PATTERNS).replace("window", "window:window=16")
    done, rows = asked("compare", "plain", "--schemes", named, "--target-length", 64)
    assert done.exit_code == 0, done.stderr
    for name in ("unpatched", *named.split(",")):
        path = folder / ("plain" if name == "unpatched" else name.partition(":")[0])
        expected = plain_loss(load(path).eval(), folder, 64)
        assert rows["perplexity", "last", name, 64, "loss"] == pytest.approx(expected, abs=1e-4), name
        assert name in done.stdout


def test_a_table_ends(asked):
    done, rows = asked("eval", "table", "--lengths", "32,64")
    assert done.exit_code == 2 and rows is None
    assert "a table of 32 positions" in done.stderr and "up to 32" in done.stderr
    with pytest.warns(UserWarning, match=r"unpatched has 32 positions and is not measured at \[64\]"):
        done, rows = asked("compare", "table", "--schemes", "alibi", "--target-length", 64)
    assert done.exit_code == 0, done.stderr
    at = {(scheme, length) for task, _, scheme, length, _ in rows if task == "perplexity"}
    assert ("alibi", 64) in at and ("unpatched", 32) in at and ("unpatched", 64) not in at


@pytest.mark.parametrize("name, opening", [("a.html", b"<!doctype html"), ("a.png", b"\x89PNG"), ("a.md", b"#")])
def test_reports_are_of_the_kind_that_is_named(asked, tmp_path, name, opening):
    if name.endswith("png"):
        pytest.importorskip("matplotlib")
    done, _ = asked("eval", "patched", "--lengths", 64, "--report", tmp_path / name)
    assert done.exit_code == 0, done.stderr
    written = (tmp_path / name).read_bytes()
    assert written[: len(opening)].lower() == opening.lower()
    assert opening.startswith(b"\x89") or b"yarn" in written


def test_a_page_of_a_comparison_has_places(asked, tmp_path):
    done, _ = asked("compare", "plain", "--schemes", "yarn", "--target-length", 64, "--report", tmp_path / "a.html")
    assert done.exit_code == 0, done.stderr
    page = (tmp_path / "a.html").read_text()
    assert re.search(r"</small> \([12](-2)?\)</td>", page) and "In brackets" in page


# What is refused, before anything is spent


@pytest.fixture
def no_work(monkeypatch):
    """Nothing may be measured: whoever gets there fails."""

    def forbidden(*args, **kwargs):
        raise AssertionError("measured before the mistake was told")

    monkeypatch.setattr(commands, "evaluate", forbidden)
    monkeypatch.setattr(decoders, "perform", forbidden)


@pytest.mark.parametrize("lengths", ["0.5k", "-1", "abc", "", "0", "64,,128", "1e3"])
def test_lengths_that_are_none(asked, no_work, lengths):
    done, _ = asked("eval", "plain", "--lengths", lengths)
    assert done.exit_code == 2 and "such as 4096 or 4k" in done.stderr


@pytest.mark.parametrize(
    "name, schemes, target, told",
    [
        ("plain", "none,yarn:beta_fst=16", 64, "Did you mean 'beta_fast'"),
        ("plain", "yarn,yarm", 64, "Did you mean 'yarn'"),
        ("plain", "yarn,yarn", 64, "once"),
        ("plain", "linear", 16, "shorter than the trained length 32"),
        ("table", "alibi,rerope", 64, "Use 'window' or 'sparse'"),
        ("patched", "yarn", 64, "unpatched model"),
        ("adapter", "yarn", 64, "unpatched model"),
    ],
)
def test_what_cannot_be_compared_is_told_first(asked, no_work, name, schemes, target, told):
    done, _ = asked("compare", name, "--schemes", schemes, "--target-length", target)
    assert done.exit_code == 2 and told in done.stderr


def test_an_unwritable_json_is_told_first(folder, no_work, tmp_path):
    done = run(
        "eval", folder / "plain", "--text", folder / "book.txt", "--lengths", 64, "--json", tmp_path / "no" / "a"
    )
    assert done.exit_code == 2 and "no/a" in done.stderr


def test_an_unknown_harness_is_told_first(asked, no_work):
    pytest.importorskip("lm_eval")
    done, _ = asked("eval", "plain", "--lengths", 64, "--tasks", "perplexity", "--harness", "rulr")
    assert done.exit_code == 2 and "Did you mean 'ruler'" in done.stderr


def test_no_task_is_a_mistake(asked):
    done, _ = asked("eval", "plain", "--lengths", 64, "--tasks", ",")
    assert done.exit_code == 2 and "task" in done.stderr


def test_no_task_to_compare_is_a_mistake(asked):
    done, _ = asked("compare", "plain", "--schemes", "yarn", "--target-length", 64, "--tasks", ",")
    assert done.exit_code == 2 and "task" in done.stderr


def test_an_encoder_with_small_logits_is_still_one(asked):
    done, _ = asked("eval", "encoder", "--lengths", 32)
    assert done.exit_code == 2 and "embed_passkey" in done.stderr


def test_an_unpatched_model_is_read_at_what_was_asked_for(asked):
    done, rows = asked("eval", "long", "--lengths", 64)
    assert done.exit_code == 0, done.stderr
    assert ("perplexity", "last", "unpatched", 64, "loss") in rows


def test_streaming_is_asked_for_passkeys(asked):
    needle = ("--tasks", "passkey", "--trials", 1, "--depths", 0.5, "--distractors", 2)
    done, _ = asked("eval", "streaming", "--lengths", 600, *needle)
    assert done.exit_code == 0, done.stderr


@pytest.mark.parametrize(
    "name, more, told",
    [
        ("plain", ("--reference", "plain"), "the model is not patched"),
        ("plain", ("--protocol", "yarn", "--no-bos"), "leave --no-bos out"),
        ("plain", ("--stride", 8), "does not use --stride; sliding, yarn would"),
        ("plain", ("--protocol", "whole", "--scored", 8), "does not use --scored; last would"),
        ("plain", ("--report", "no/a.html"), "no directory"),
        ("plain", ("--out", "no/a.jsonl"), "no directory"),
        ("plain", ("--json", "."), "is a directory"),
        ("encoder", (), "embed_passkey"),  # not that 64 tokens of 32 cannot be scored
    ],
)
def test_what_would_go_unheeded_or_unwritten_is_told(folder, monkeypatch, name, more, told):
    monkeypatch.chdir(folder)
    done = run("eval", name, "--text", "book.txt", "--lengths", 32, *more)
    assert done.exit_code == 2 and told in done.stderr


def test_a_picture_without_matplotlib_is_told_first(asked, no_work, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done, _ = asked("eval", "plain", "--lengths", 64, "--report", tmp_path / "a.png")
    assert done.exit_code == 2 and "pip install" in done.stderr


def test_a_tax_beyond_the_text_is_left_out(folder):
    words, documents = bytes_tokenizer(), read_documents([folder / "book.txt"], bytes_tokenizer())
    model = patch_model(reader(max_position_embeddings=131072), "linear", factor=2.0)
    with pytest.warns(UserWarning, match=r"tax is not measured: .*131072 tokens are needed"):
        rows = evaluate(model, words, documents, options=Options(lengths=(128,)))
    assert {(row.task, row.length) for row in rows} == {("perplexity", 128)}


def test_a_scheme_that_fails_is_named(asked, no_work):
    done, _ = asked("compare", "plain", "--schemes", "ntk,yarn:factor=0.5", "--target-length", 64)
    assert done.exit_code == 2 and "hf-posenc: yarn:factor=0.5: " in done.stderr


def test_what_nobody_need_act_on_is_not_logged(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    logger = logging.getLogger("transformers.modeling_rope_utils")
    told = "Missing validation function in 'RotaryEmbeddingConfigMixin' for 'rope_type'='%s'"
    with commands.hush_transformers():
        logger.error(told, "hf_posenc")
        logger.error(told, "other")
    logger.error(told, "hf_posenc")
    assert list(dict.fromkeys(record.args for record in caplog.records)) == [("other",), ("hf_posenc",)]


# What goes on


def test_a_harness_goes_on_too(asked, monkeypatch, tmp_path):
    pytest.importorskip("lm_eval")
    from hf_posenc.evaluation.suites import harness

    sizes, measured = [], harness.run_task

    def counted(lm, *args):
        sizes.append(lm.batch_size)
        return measured(lm, *args)

    monkeypatch.setattr(harness, "run_task", counted)
    more = ("--lengths", 2048, "--tasks", ",", "--harness", "niah_single_1", "--samples", 2)
    more += ("--batch-size", 2, "--out", tmp_path / "a.jsonl")
    first, second = asked("eval", "plain", *more), asked("eval", "plain", *more)
    assert first[0].exit_code == second[0].exit_code == 0, first[0].stderr
    assert sizes == [2] and first[1] == second[1] and len(first[1]) == 1


def test_another_tokenizer_is_another_run(folder, tmp_path):
    given = {"options": Options(lengths=(96,)), "out": tmp_path / "a.jsonl"}
    words = bytes_tokenizer()
    documents = read_documents([folder / "book.txt"], words)
    evaluate(reader(), words, documents, **given)
    words.add_tokens(["the cat"])
    with pytest.raises(PosencError, match="tokenizer changed"):
        evaluate(reader(), words, documents, **given)


def test_lm_eval_tells_unknown_tasks_plainly(ruler_alone, folder):
    given = ("--model", "hf-posenc", "--model_args", f"pretrained={folder / 'plain'}", "--tasks", "nope")
    done = run("lm-eval", "run", *given)
    assert done.exit_code == 2 and "nope" in done.stderr


def test_only_the_same_run_goes_on(asked, tmp_path):
    more = ("--lengths", 64, "--out", tmp_path / "a.jsonl")
    assert asked("eval", "plain", *more)[0].exit_code == 0
    kept = (tmp_path / "a.jsonl").read_bytes()
    assert asked("eval", "plain", *more, "--batch-size", 1)[0].exit_code == 0  # no figure depends on it
    for name, text, other, told in [
        ("plain", "other.txt", (), "text changed"),
        ("patched", "book.txt", (), "model changed"),
        ("plain", "book.txt", ("--no-bos", "--seed", 1), "options changed"),
        ("plain", "book.txt", ("--dtype", "bfloat16"), "model changed"),
    ]:
        done, _ = asked("eval", name, *more, *other, text=text)
        assert done.exit_code == 2 and told in done.stderr and "another file" in done.stderr
    assert (tmp_path / "a.jsonl").read_bytes() == kept


def test_texts_in_another_order_are_another_run(folder, tmp_path):
    book, other = folder / "book.txt", folder / "other.txt"
    given = ("eval", folder / "plain", "--lengths", 64, *SMALL, "--out", tmp_path / "a.jsonl", "--text")
    assert run(*given, book, "--text", other).exit_code == 0
    assert run(*given, other, "--text", book).exit_code == 2


@pytest.mark.parametrize("line", ['{"format": 1}', '{"format": 1, "run": 3}', '{"format": 1, "run": {}}'])
def test_a_file_that_is_not_ours_is_refused(asked, tmp_path, line):
    (tmp_path / "a.jsonl").write_text(line + "\n")
    done, _ = asked("eval", "plain", "--lengths", 64, "--out", tmp_path / "a.jsonl")
    assert done.exit_code == 2 and "a.jsonl" in done.stderr


def test_an_interrupt_keeps_what_is_done(folder, tmp_path):
    out = tmp_path / "run.jsonl"
    given = ["compare", folder / "plain", "--schemes", "self_extend,none", "--text", folder / "book.txt"]
    given += ["--target-length", 1024, "--lengths", "256,512,1k", "--protocol", "sliding", "--stride", 32]
    given += ["--max-tokens", 1500, "--batch-size", 1, "--out", out]
    running = fork(command(*given), tmp_path / "said")
    end = time.monotonic() + 300
    while time.monotonic() < end and (not out.exists() or out.read_bytes().count(b"\n") < 2):
        time.sleep(0.02)
    os.kill(running.pid, signal.SIGINT)
    running.join(timeout=120)
    assert running.exitcode == 130 and "Traceback" not in (tmp_path / "said").read_text()
    kept = out.read_bytes()
    assert kept.endswith(b"\n") and 2 <= kept.count(b"\n") < 12  # interrupted in the middle
    assert run(*given, "--json", tmp_path / "a.json").exit_code == 0
    assert out.read_bytes().startswith(kept)
    assert run(*given[:-2], "--json", tmp_path / "b.json").exit_code == 0
    assert rows_of(tmp_path / "a.json") == rows_of(tmp_path / "b.json")
