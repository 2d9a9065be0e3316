"""What the command line lists and completes, whatever the width of the terminal."""

import re

import pytest
import torch
from typer.testing import CliRunner

from hf_posenc.cli import names, tables
from hf_posenc.cli.main import app
from hf_posenc.evaluation import TASKS
from hf_posenc.evaluation.measures.perplexity import PROTOCOLS
from hf_posenc.evaluation.runs.options import READING_TASKS
from hf_posenc.schemes import SCHEMES


@pytest.mark.parametrize("columns", [20, 40, 80, 120, 200, None])
def test_tables_break_nothing_but_their_last_column(columns, monkeypatch):
    monkeypatch.setattr(tables, "width", lambda: columns)
    rows = [["a" * 30, "short", "many words that go on below themselves " * 3], ["b", "x", ""]]
    text = tables.table(["name", "kind", "what"], rows)
    assert "a" * 30 in text.split() and [word for word in text.split() if word == "themselves"] == ["themselves"] * 3
    assert all(line.startswith(" " * 39) for line in text.splitlines()[2:-1])
    room = columns is not None and columns >= 39 + tables.NARROW
    assert not room or max(map(len, text.splitlines())) <= columns


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_schemes_are_listed_by_their_whole_names_at_any_width(columns):
    done = CliRunner().invoke(app, ["schemes"], env={"COLUMNS": columns})
    lines = done.stdout.splitlines()
    assert [name for name in SCHEMES if not any(line.split()[:1] == [name] for line in lines)] == []
    assert len(lines) < 2 * len(SCHEMES) + 16 or int(columns) < 80
    assert not any(line.startswith("refused: alibi") for line in lines)
    assert max(map(len, lines)) <= max(int(columns), 80)
    why = CliRunner().invoke(app, ["schemes", "--why"], env={"COLUMNS": columns}).stdout
    said = " ".join(why.split())
    assert re.search(r"\bwindow\b[^:]*: on a bias", said) and "cannot be kept" in said


def test_help_prints_its_examples_whole_at_80_columns():
    help_text = CliRunner().invoke(app, ["compare", "--help"], env={"COLUMNS": "80"}).stdout
    assert "none,linear,yarn:factor=4,beta_fast=16." in help_text and "…" not in help_text


def test_describe_prints_no_empty_rows():
    rows = CliRunner().invoke(app, ["describe", "tiny"]).stdout.splitlines()
    assert len(rows) > 10 and not [row for row in rows if not row[22:].strip()]


def test_names_that_are_checked_without_their_code_are_those_of_the_code():
    assert names.TASKS == TASKS and {*READING_TASKS} <= {*names.TASKS}
    assert set(names.PROTOCOLS) == set(PROTOCOLS)
    assert list(names.scheme_names()) == sorted(SCHEMES)
    assert all(hasattr(torch, name) for name in names.DTYPES if name != "auto")
    from hf_posenc.evaluation.suites.harness import SUITES
    from hf_posenc.evaluation.suites.lemb import SUITE
    from hf_posenc.patching.patch import EXISTING

    assert set(names.HARNESSES) == {*SUITES, "ruler_offline", SUITE}
    assert names.EXISTING == EXISTING


def test_schemes_of_other_packages_are_known(monkeypatch):
    class Point:
        name = "bell"

    monkeypatch.setattr(names, "entry_points", lambda group: [Point] if group == "hf_posenc.schemes" else [])
    names.scheme_names.cache_clear()
    try:
        assert "bell" in names.scheme_names()
    finally:
        names.scheme_names.cache_clear()


@pytest.mark.parametrize(
    "typed, expected",
    [
        ("hf-posenc patch a b --scheme ya", {"yarn"}),
        ("hf-posenc compare a --schemes yarn,lo", {"yarn,longrope"}),
        ("hf-posenc eval a --tasks passkey,multi", {"passkey,multikey", "passkey,multivalue"}),
        ("hf-posenc co", {"compare"}),
    ],
)
def test_shells_complete_names(typed, expected):
    environment = {"_HF_POSENC_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    done = CliRunner().invoke(app, [], prog_name="hf-posenc", env=environment)
    assert set(done.stdout.split()) == expected
