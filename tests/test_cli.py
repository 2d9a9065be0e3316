"""The command line, run as a user runs it, and the documentation's table, which must say the same."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from hf_posenc import SCHEMES
from hf_posenc.cli.main import app
from hf_posenc.families import FAMILIES
from hf_posenc.families.verified import verified
from hf_posenc.patching.grades import KINDS, MEANING, cells, table_markdown

ROOT = Path(__file__).parent.parent
SCRIPT = str(Path(sys.executable).with_name("hf-posenc"))
COMMANDS = {"module": [sys.executable, "-m", "hf_posenc"], "script": [SCRIPT]}


def run(how: str, *arguments: str, columns: int = 200) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": str(columns), "NO_COLOR": "1", "HF_HUB_OFFLINE": "1"}
    command = [*COMMANDS[how], *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=ROOT)


@pytest.mark.parametrize("how", COMMANDS)
def test_schemes_lists_every_cell(how):
    done = run(how, "schemes")
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line for line in done.stdout.splitlines() if line.strip()}
    grades = cells()
    for name in SCHEMES.built_in():
        scheme = SCHEMES[name]
        expected = [grades[name, kind].partition(":")[0] for kind in KINDS]
        assert rows[name].split()[1 : 1 + len(expected)] == expected
        assert scheme.summary in rows[name]
    assert [kind for kind in KINDS if f"on {kind}" not in rows["scheme"]] == []
    for grade, meaning in MEANING.items():
        assert f"{grade}: {meaning}" in done.stdout


def test_families_lists_every_model_type():
    done = run("script", "families")
    assert done.returncode == 0, done.stderr
    families = [FAMILIES[name] for name in FAMILIES.built_in()]
    for family in families:
        (row,) = [line for line in done.stdout.splitlines() if line.split()[:1] == [family.name]]
        assert family.positions in row
        assert family.model_types or "every other" in row
    words = set(done.stdout.replace(",", " ").split())
    assert {kind for family in families for kind in family.model_types} <= words


def test_verified_families_are_listed_offline():
    done = run("script", "families", "--verified", columns=200)
    assert done.returncode == 0, done.stderr
    words = set(done.stdout.split())
    assert set(verified()["families"]) <= words
    assert f"{len(verified()['families'])} model types" in done.stdout


def test_names_are_whole_on_a_narrow_terminal():
    words = run("script", "schemes", columns=80).stdout.split()
    assert [name for name in SCHEMES.built_in() if name not in words] == []


@pytest.mark.parametrize("arguments", [["nonsense"], ["schemes", "--nonsense"]])
def test_a_wrong_command_fails_without_a_traceback(arguments):
    done = run("script", *arguments)
    assert done.returncode != 0
    assert "nonsense" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_the_table_of_schemes_says_nothing_that_is_not_so():
    """It may lag behind a scheme whose file is new, until `make docs`; what it says is right."""
    readme = (ROOT / "docs" / "schemes" / "README.md").read_text(encoding="utf-8")
    assert readme.count("<!-- table -->") == readme.count("<!-- /table -->") == 1
    said = readme.partition("<!-- table -->")[2].partition("<!-- /table -->")[0].strip().splitlines()
    true = table_markdown().splitlines()
    assert said[:2] == true[:2]
    assert [row for row in said if row not in true] == []
    assert len(said) == len(set(said)) >= 24


def test_make_docs_writes_the_table(tmp_path):
    """On a page that is out of date, and leaves the rest of it alone."""
    page = tmp_path / "docs" / "schemes" / "README.md"
    page.parent.mkdir(parents=True)
    for script in (ROOT / "docs").glob("*.py"):
        shutil.copy(script, tmp_path / "docs")
    page.write_text("before\n<!-- table -->\nold\n<!-- /table -->\nafter\n")
    subprocess.run([sys.executable, tmp_path / "docs" / "tables.py"], check=True, timeout=120)
    written = page.read_text()
    assert written == f"before\n<!-- table -->\n{table_markdown()}\n<!-- /table -->\nafter\n"


def test_the_help_of_every_command_shows_how_it_is_called():
    for name, command in get_command(app).commands.items():
        inner = getattr(command, "commands", None)
        for called, each in (
            {f"{name} {sub}": one for sub, one in inner.items()}.items() if inner else [(name, command)]
        ):
            own = name in ("train", "lm-eval", "recipes")  # which write their help by themselves
            assert own or f"hf-posenc {called}" in (each.help or ""), called


def test_a_reader_who_has_read_enough_is_no_error():
    process = subprocess.Popen(
        [*COMMANDS["module"], "schemes"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    )
    process.stdout.close()  # as `| head` does
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(60) == 1
