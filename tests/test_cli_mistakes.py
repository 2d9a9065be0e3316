"""What the command line says to people who have mistyped, who have no network, or who press Ctrl-C.

Everything is asked on a terminal of 40 columns: names, paths and commands come in one piece all the same.
"""

import json
import os
import sys
import warnings
from pathlib import Path

import pytest
import torch
from evaluated import STORY, bytes_tokenizer, reader
from peft import LoraConfig, get_peft_model
from typer.testing import CliRunner

from hf_posenc import PosencError, UntrainedWarning, load, patch_model, save
from hf_posenc.checkpoints import hub
from hf_posenc.checkpoints.files import find
from hf_posenc.cli import messages
from hf_posenc.cli.main import app
from hf_posenc.evaluation import Options, Row, evaluate, tokenized
from hf_posenc.evaluation.measures.text_files import text_files
from hf_posenc.models import model_path

LONG = "a-folder-whose-name-alone-is-longer-than-a-terminal-is-wide"


def run(*arguments):
    """A command on a narrow terminal; an exception that is no exit would be a traceback on the user's screen."""
    done = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "40", "NO_COLOR": "1"})
    assert done.exception is None or isinstance(done.exception, SystemExit), repr(done.exception)
    return done


def error_of(*arguments) -> str:
    done = run(*arguments)
    assert done.exit_code == 2, done.stdout + done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("models") / LONG
    for name, model in {"plain": reader(), "encoder": reader("bert")}.items():
        save(model, root / name)
        bytes_tokenizer().save_pretrained(root / name)
    (root / "book.txt").write_text(STORY)
    return root


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """An adapter whose base is the model inside the package, as recipes write it."""
    base = patch_model(load("tiny", dtype=torch.float32), "yarn", target_length=1024)
    lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    wrapped = get_peft_model(base, lora)
    wrapped.peft_config["default"].base_model_name_or_path = "tiny"
    path = tmp_path_factory.mktemp("tiny") / "adapter"
    save(wrapped, path)
    return path


# `tiny`, wherever a model can be named

PASSKEY = ("--lengths", "256", "--tasks", "passkey", "--trials", 1, "--depths", 0.5, "--distractors", 1)


@pytest.mark.parametrize(
    "command",
    [
        ("describe", "tiny"),
        ("eval", "tiny", *PASSKEY),
        ("eval", "tiny", *PASSKEY, "--tokenizer", "tiny"),
        ("compare", "tiny", "--schemes", "ntk", "--target-length", "1k", *PASSKEY),
    ],
    ids=["describe", "eval", "tokenizer", "compare"],
)
def test_the_model_of_the_package_is_known_to_commands(command):
    done = run(*command)
    assert done.exit_code == 0, done.stderr


def test_the_model_of_the_package_is_patched_on_disk(tmp_path):
    done = run("patch", "tiny", tmp_path / "long", "--scheme", "yarn", "--target-length", "1k")
    assert done.exit_code == 0, done.stderr
    assert load(tmp_path / "long").config.max_position_embeddings == 1024
    assert "1024" in done.stdout and f"{tmp_path / 'long'} is written." in done.stdout


@pytest.mark.parametrize("option", ["target_length=1k", "target_length=1024"])
def test_a_length_is_a_length_wherever_it_is_written(option, tmp_path):
    done = run("patch", "tiny", tmp_path / "long", "--scheme", "yarn", "--option", option)
    assert done.exit_code == 0, done.stderr
    assert load(tmp_path / "long").config.max_position_embeddings == 1024


def test_an_adapter_on_the_model_of_the_package(adapter, tmp_path):
    for command in [("describe", adapter), ("merge", adapter, tmp_path / "merged"), ("eval", adapter, *PASSKEY)]:
        done = run(*command)
        assert done.exit_code == 0, done.stderr
    assert "LORA on tiny" in run("describe", adapter).stdout
    assert find("tiny", "config.json", {}) == os.path.join(model_path("tiny"), "config.json")


def test_a_folder_of_the_same_name_is_not_mistaken_for_it(tmp_path, monkeypatch):
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    told = error_of("describe", "tiny")
    assert "./tiny for the folder" in told and model_path(os.path.realpath(find_tiny())) in told
    assert "holds no config.json" in error_of("describe", "./tiny")


def find_tiny() -> str:
    from hf_posenc.models import HERE

    return str(HERE / "tiny")


# Names that are not there


@pytest.fixture
def no_network(monkeypatch):
    """A hub that is asked, and does not answer."""
    asked = []

    def unreachable(self, name, **more):
        asked.append(name)
        raise ConnectionError("[Errno -2] Name or service not known")

    monkeypatch.setattr(hub.HfApi, "model_info", unreachable)
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_troubles", {})
    monkeypatch.setattr(hub, "file_of", lambda *args, **kwargs: pytest.fail("tried file by file"))
    return asked


@pytest.mark.parametrize("command", ["describe", "eval", "compare"])
def test_a_hub_that_cannot_be_reached_is_told_from_one_without_the_model(command, no_network):
    more = {"eval": PASSKEY, "compare": ("--schemes", "ntk", "--target-length", "1k", *PASSKEY)}.get(command, ())
    told = error_of(command, "some-organisation/Some-Model-3.2-1B", *more)
    assert "cannot be asked: [Errno -2] Name or service not known" in told
    assert "hf download some-organisation/Some-Model-3.2-1B" in told
    assert "is not a checkpoint" not in told
    assert no_network == ["some-organisation/Some-Model-3.2-1B"]


def test_a_mistyped_folder_is_answered_with_the_right_one(no_network, tmp_path, monkeypatch):
    (tmp_path / "long-stories").mkdir()
    monkeypatch.chdir(tmp_path)
    for typed in (("describe", "long-storys"), ("patch", "long-storys", "out", "--scheme", "yarn", "--factor", 2)):
        assert "did you mean 'long-stories'?" in error_of(*typed)
    assert "did you mean 'tiny'?" in error_of("describe", "tinny")
    for typed in (("describe", "runs/a/b"), ("patch", "runs/a/b", "out", "--scheme", "yarn", "--factor", 2)):
        told = error_of(*typed)
        assert "There is no folder 'runs/a/b'" in told and "hf download" not in told
    assert "is not a directory: nothing of that name is there" in error_of("describe", "./long-storys")
    assert "is not a directory: nothing of that name is there" in error_of("describe", tmp_path / LONG)


def test_without_leave_to_ask_the_hub_is_not_asked(monkeypatch):
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "_troubles", {})
    assert "cannot be asked: HF_HUB_OFFLINE is set" in error_of("describe", "nobody/nothing")
    with pytest.raises(PosencError, match="local_files_only is set"):
        load("nobody/nothing", local_files_only=True)


def test_a_model_in_the_cache_is_used_while_there_is_no_network(no_network, monkeypatch, tmp_path):
    snapshot = tmp_path / "models--somebody--little" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(snapshot.name)
    reader().config.save_pretrained(snapshot)
    monkeypatch.undo()
    monkeypatch.setattr(hub.HfApi, "model_info", lambda self, name, **more: 1 / 0)
    monkeypatch.setattr(hub, "_troubles", {})
    found = find("somebody/little", "config.json", {"cache_dir": str(tmp_path)})
    assert found is not None and json.loads(Path(found).read_text())["model_type"] == "llama"
    assert find("somebody/little", "adapter_config.json", {"cache_dir": str(tmp_path)}) is None


def test_what_the_hub_says_is_passed_on(monkeypatch):
    monkeypatch.setattr(hub.HfApi, "model_info", lambda self, name, **more: None)
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_troubles", {})

    def missing(*args, **kwargs):
        raise OSError("it is a gated repository")

    monkeypatch.setattr(hub, "file_of", missing)
    with pytest.raises(PosencError, match="nor a model that can be had from the hub: it is a gated repository"):
        find("somebody/secret", "config.json", {})


def test_a_model_of_a_hub_is_fetched_before_it_is_patched_on_disk(tmp_path):
    told = error_of("patch", "somebody/model", tmp_path / "out", "--scheme", "alibi")
    assert "hf download somebody/model" in told


def test_an_adapter_is_merged_before_it_is_patched(adapter, tmp_path):
    told = error_of("patch", adapter, tmp_path / "out", "--scheme", "alibi")
    assert f"hf-posenc merge {adapter} MERGED" in told and not (tmp_path / "out").exists()


def test_what_is_no_adapter_is_told_before_weights_are_loaded(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("hf_posenc.checkpoints.merge.load", lambda *a, **k: pytest.fail("loaded"))
    assert "holds no adapter to merge" in error_of("merge", folder / "plain", tmp_path / "out")


# Text


@pytest.mark.parametrize(
    "name, content, told",
    [
        ("gone.txt", None, "There is no text file"),
        ("latin.txt", "Ein Café".encode("latin-1"), "byte 0xe9 at 7"),
        ("wide.txt", "text".encode("utf-16"), "is text in UTF-16"),
        ("image.txt", b"\x89PNG\0\0", "it holds binary data"),
    ],
)
def test_text_that_cannot_be_read(name, content, told, tmp_path):
    path = tmp_path / LONG / name
    path.parent.mkdir()
    if content is not None:
        path.write_bytes(content)
    said = error_of("eval", "tiny", "--lengths", 64, "--text", path)
    assert told in said and str(path) in said
    if name in ("latin.txt", "wide.txt"):
        assert f"-t UTF-8 {path} > " in said and "iconv -f " in said


def test_texts_are_files_folders_and_patterns(tmp_path):
    books = tmp_path / "books"
    (books / "old").mkdir(parents=True)
    for name in ("b.txt", "a.txt", "old/c.md", "notes.csv"):
        (books / name).write_text(name)
    names = [books / "a.txt", books / "b.txt", books / "old" / "c.md"]
    assert text_files([books]) == names
    assert text_files([str(books / "*.txt"), books / "a.txt"]) == names[:2]
    assert text_files([books / "notes.csv"]) == [books / "notes.csv"]
    assert text_files([str(books / "**" / "*.md")]) == names[2:]
    for wrong, told in {
        str(books / "*.pdf"): "No file matches",
        str(books / "nowhere" / "a.txt"): "There is no folder",
        str(books / "a.txtt"): "Did you mean 'a.txt'",
        f"{books / 'a.txt'},{books / 'b.txt'}": f"--text {books / 'a.txt'} --text {books / 'b.txt'}",
    }.items():
        with pytest.raises(PosencError) as error:
            text_files([wrong])
        assert told in str(error.value)
    (tmp_path / "empty").mkdir()
    with pytest.raises(PosencError, match="holds no text files"):
        text_files([tmp_path / "empty"])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_text_without_leave_to_read_it(tmp_path):
    path = tmp_path / "secret.txt"
    path.write_text("secret")
    path.chmod(0)
    assert f"{path} cannot be read: Permission denied" in error_of("eval", "tiny", "--lengths", 64, "--text", path)


@pytest.mark.parametrize(
    "more, told",
    [
        (("--schemes", "yarn", "ntk"), "--schemes yarn,ntk"),
        (("--schemes", "yarn", "--lengths", "1k", "2k"), "--schemes yarn,2k"),
    ],
)
def test_lists_with_spaces(more, told):
    assert told in error_of("compare", "tiny", *more, "--target-length", "1k")


def test_a_pattern_that_the_shell_has_expanded(folder, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(STORY)
    told = error_of("eval", "tiny", "--lengths", 64, "--text", folder / "book.txt", other)
    assert "quote a pattern: --text 'books/*.txt'" in told


# What is told beside figures


def test_a_changed_option_is_told_alone(folder, tmp_path):
    given = ("eval", folder / "plain", "--text", folder / "book.txt", "--out", tmp_path / "a.jsonl")
    given += ("--lengths", 600, "--windows", 2, "--scored", 8)
    assert run(*given).exit_code == 0
    told = error_of(*given, "--tasks", "perplexity,passkey")
    assert "options changed (tasks: perplexity -> perplexity,passkey)." in told and len(told) < 400
    told = error_of(*given[:-4], "--windows", 3, "--scored", 8)
    assert "options changed (windows: 2 -> 3)." in told
    (tmp_path / "book.txt").write_text(STORY[::-1])
    given = [tmp_path / "book.txt" if word == folder / "book.txt" else word for word in given]
    assert "text changed (the contents of book.txt)." in error_of(*given)


def test_an_interrupt_says_what_is_kept_and_how_to_go_on(folder, tmp_path, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_posenc.cli.run_evaluation.evaluate", interrupt)
    out = tmp_path / LONG
    given = ("eval", folder / "plain", "--text", folder / "book.txt", "--lengths", 64)
    done = run(*given)
    assert done.exit_code == messages.INTERRUPTED and "Nothing was kept: with --out FILE" in done.stderr
    out.write_text('{"format": 1}\n{"job": 1}\n{"job": 2}\n')
    done = run(*given, "--out", out)
    assert f"2 results are kept in {out}: the same command resumes the run." in done.stderr
    monkeypatch.setattr("hf_posenc.checkpoints.on_disk.describe_checkpoint", interrupt)
    assert run("describe", "tiny").stderr == "hf-posenc: interrupted.\n"


def test_a_decoder_that_is_asked_for_embeddings_is_warned_of():
    words = bytes_tokenizer()
    options = Options(lengths=(600,), tasks=("embed_passkey",))
    warned = pytest.warns(UserWarning, match="LlamaForCausalLM predicts the next token and was hardly trained to emb")
    with warned, pytest.raises(PosencError):
        evaluate(reader(max_position_embeddings=64), words, [], options=options, force=False, reference=reader())


def test_a_comparison_opens_with_who_is_first(folder):
    given = (
        "--target-length",
        64,
        "--lengths",
        "600,700",
        "--text",
        folder / "book.txt",
        "--windows",
        4,
        "--scored",
        8,
    )
    needle = ("--tasks", "perplexity,passkey", "--trials", 2, "--depths", "0,1", "--distractors", 1)
    done = run("compare", folder / "plain", "--schemes", "ntk,alibi", *given, *needle)
    assert done.exit_code == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line]
    assert lines[0].startswith("At ") and lines.index(next(x for x in lines if "passkey" in x)) > 8
    (row,) = [line for line in lines[-4:] if line.startswith("alibi")]
    assert row.count("±") == row.count("(4)") == 2  # both depths together, at both lengths


def test_warnings_are_one_line(folder, tmp_path):
    with pytest.warns(UntrainedWarning, match="'yarn' gives this 'bert' model positions that its weights were not"):
        assert run("patch", folder / "encoder", tmp_path / "out", "--scheme", "yarn", "--factor", 2).exit_code == 0
    before = warnings.formatwarning
    with messages.plain_errors():
        line = warnings.formatwarning("Mind the gap.", UserWarning, f"/{LONG}/file.py", 3)
    assert line == "hf-posenc: warning: Mind the gap.\n" and warnings.formatwarning is before


def test_errors_of_the_system_name_their_file_and_what_to_do():
    error = PermissionError(1, "Operation not permitted", f"/{LONG}")
    assert messages.error_message(error) == (
        f"/{LONG}: Operation not permitted. Check its owner and mode, or name another place."
    )
    assert messages.error_message(OSError(28, "No space left on device", "/a", None, "/b")) == (
        "/a -> /b: No space left on device."
    )
    assert messages.error_message(OSError("something else")) == "something else"


# Tables and names


def test_versions_are_told():
    done = run("--version")
    assert done.exit_code == 0
    assert done.stdout.splitlines()[0] == f"hf-posenc {sys.modules['hf_posenc'].__version__}"
    assert f"torch {torch.__version__}" in done.stdout


def test_rows_are_pooled_over_depths():
    from hf_posenc.cli.results import pooled_accuracy

    common = {"task": "passkey", "protocol": "generation", "scheme": "a", "length": 8, "metric": "accuracy"}
    rows = [Row(**common, value=v, stderr=0.1, n=n, details={"depth": d}) for v, n, d in [(1.0, 6, 0), (0.5, 2, 1)]]
    assert pooled_accuracy(rows) == "0.88 ±0.12 (8)"


def test_read_documents_takes_folders(folder, tmp_path):
    from hf_posenc.evaluation import read_documents

    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_text("two")
    words = bytes_tokenizer()
    found = read_documents([tmp_path], words)
    assert [d.name for d in found] == ["a.txt", "b.txt"]
    assert [d.digest for d in found] == [d.digest for d in tokenized({"a.txt": "one", "b.txt": "two"}, words)]
