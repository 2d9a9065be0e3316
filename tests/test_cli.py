"""The command line, run as a user runs it, and the documentation's table, which must say the same."""

import os
import runpy
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from forked import command, fork
from typer.main import get_command

from hf_posenc import SCHEMES
from hf_posenc.cli.main import app
from hf_posenc.families import FAMILIES
from hf_posenc.families.verified import verified_families
from hf_posenc.patching.grades import KINDS, MEANING, cells, table_markdown

ROOT = Path(__file__).parent.parent
SCRIPT = str(Path(sys.executable).with_name("hf-posenc"))
COMMANDS = {"module": [sys.executable, "-m", "hf_posenc"], "script": [SCRIPT]}


def run(how: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "HF_HUB_OFFLINE": "1"}
    typed = [*COMMANDS[how], *arguments]
    return subprocess.run(typed, capture_output=True, text=True, timeout=120, env=environment, cwd=ROOT)


@pytest.fixture
def asked(tmp_path):
    """What a command prints, without the seconds that a start takes."""

    def run(*arguments: str, columns: int = 200) -> str:
        process = fork(command(*arguments), tmp_path / "said", COLUMNS=str(columns), NO_COLOR="1")
        process.join(120)
        said = (tmp_path / "said").read_text()
        assert process.exitcode == 0, said
        return said

    return run


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


def test_families_lists_every_model_type(asked):
    listed = asked("families")
    families = [FAMILIES[name] for name in FAMILIES.built_in()]
    for family in families:
        (row,) = [line for line in listed.splitlines() if line.split()[:1] == [family.name]]
        assert family.positions in row
        assert family.model_types or "every other" in row
    words = set(listed.replace(",", " ").split())
    assert {kind for family in families for kind in family.model_types} <= words


def test_verified_families_are_listed_offline(asked):
    listed = asked("families", "--verified")
    words = set(listed.split())
    assert set(verified_families()["families"]) <= words
    assert f"{len(verified_families()['families'])} model types" in listed


def test_names_are_whole_on_a_narrow_terminal(asked):
    words = asked("schemes", columns=80).split()
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


def run_script(script: Path) -> None:
    """As `python FILE` does, with the modules that lie beside the file."""
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "/").parent == ROOT / "docs":
            del sys.modules[name]
    sys.path[:] = [str(script.parent), *(path for path in sys.path if path != str(ROOT / "docs"))]
    runpy.run_path(str(script), run_name="__main__")


def test_make_docs_writes_the_table(tmp_path):
    """On a page that is out of date, and leaves the rest of it alone."""
    page = tmp_path / "docs" / "schemes" / "README.md"
    page.parent.mkdir(parents=True)
    for script in (ROOT / "docs").glob("*.py"):
        shutil.copy(script, tmp_path / "docs")
    page.write_text("before\n<!-- table -->\nold\n<!-- /table -->\nafter\n")
    process = fork(partial(run_script, tmp_path / "docs" / "tables.py"))
    process.join(120)
    assert process.exitcode == 0
    written = page.read_text()
    assert written == f"before\n<!-- table -->\n{table_markdown()}\n<!-- /table -->\nafter\n"


def test_the_help_of_every_command_shows_how_it_is_called():
    for name, known in get_command(app).commands.items():
        inner = getattr(known, "commands", None)
        for called, each in {f"{name} {sub}": one for sub, one in inner.items()}.items() if inner else [(name, known)]:
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
