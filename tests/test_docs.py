"""Code and commands of the documentation: run as they stand, or marked with why not, and counted."""

import re
import shlex
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest
from click.exceptions import UsageError
from typer.main import get_command
from typer.testing import CliRunner

from hf_posenc.cli.main import app
from hf_posenc.training.stdlib import stdlib_texts

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
PYTHON = re.compile(r"^(<!-- not run: .+ -->\n)?```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ELSEWHERE = {"README.md", "quickstart.md", "extending.md"}
"""Their code is run by test_readme.py and test_extending.py."""
NOT_RUN = {"trainers.md": 1, "encoders.md": 1}
"""Blocks of Python that need a hub; test_other_trainers.py and test_sentence_transformers.py run what they show."""
FREE = {"train", "lm-eval", "bench"}
"""Commands that read the rest of their line by themselves."""


def test_code_that_is_not_run_is_marked_and_counted():
    found = {page.name: sum(bool(mark) for mark, _ in PYTHON.findall(page.read_text("utf-8"))) for page in PAGES}
    assert {name: n for name, n in found.items() if n} == NOT_RUN


@pytest.mark.parametrize("page", [p for p in PAGES if p.name not in ELSEWHERE], ids=lambda page: page.name)
def test_code_runs_as_it_stands(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    names: dict[str, object] = {}
    for mark, block in PYTHON.findall(page.read_text("utf-8")):
        if not mark:
            exec(compile(block, page.name, "exec"), names)


def commands() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        blocks = [block for kind, block in BLOCK.findall(page.read_text("utf-8")) if kind in ("", "sh", "bash")]
        for block in blocks:
            for line in block.replace("\\\n", " ").splitlines():
                if line.startswith("hf-posenc ") and "|" not in line:
                    found.append((page.name, line))
    return found


@pytest.mark.parametrize(("page", "line"), commands())
def test_commands_are_understood(page, line):
    """By the command line itself, options and all; what they do is tested with each command."""
    words = shlex.split(line, comments=True)[1:]
    command = get_command(app)
    name, rest = words[0], words[1:]
    assert name in command.commands, line
    if name in FREE:
        return
    try:
        command.commands[name].make_context(name, list(rest), resilient_parsing=False)
    except UsageError as error:
        pytest.fail(f"{page}: {line}: {error.format_message()}")


WALKS = {"README.md": 1, "extend.md": 9, "search.md": 1}
"""Commands that name `tiny` or what came of it, run here in the order in which a reader meets them."""
TEMPLATES = {"checkpoints.md": 3, "encoders.md": 2, "evaluation.md": 5, "quickstart.md": 10, "recipes.md": 4}
TEMPLATES |= {"search.md": 2, "serving.md": 9, "study.md": 2}
"""Commands for a model or text of the reader's own: understood here, and run by the tests of each command."""
OTHERS = {"README.md": 2, "demo.md": 1, "extending.md": 3, "recipes.md": 2, "serving.md": 1, "study.md": 2}
OTHERS |= {"attacks.md": 4, "evaluation.md": 1}
"""Commands of other programs (pip, make, python, accelerate), and one synopsis."""
FIRST_LOOK = {"eval": ["--trials", "1", "--windows", "2"]}
"""What makes a walk short enough for a test."""


def walk(page: str) -> list[str]:
    """The commands of a page that need nothing of a reader's own; a page of which that is told once is all of it."""
    lines = [line for name, line in commands() if name == page]
    return lines if page == "extend.md" else [line for line in lines if " tiny " in line]


def test_commands_are_counted():
    """By what a test does with them: run as they stand, understood by the command line, or left to other programs."""
    assert {page: len(walk(page)) for page in dict(commands()) if walk(page)} == WALKS
    left = Counter(name for name, line in commands() if line not in walk(name))
    assert left == TEMPLATES
    found = {}
    for page in PAGES:
        blocks = [block for kind, block in BLOCK.findall(page.read_text("utf-8")) if kind in ("", "sh", "bash")]
        lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]
        found[page.name] = len(lines) - len([name for name, _ in commands() if name == page.name])
    assert {name: n for name, n in found.items() if n} == OTHERS


@pytest.mark.parametrize("page", WALKS)
def test_a_walk_runs_as_it_stands(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("\n".join(stdlib_texts(held_out=True).values())[:100_000], encoding="utf-8")
    for line in walk(page):
        words = shlex.split(line, comments=True)[1:]
        if (
            words[0] == "train"
        ):  # minutes; test_finetune.py runs this recipe, and what is patched stands in for its model
            shutil.copytree("long-tiny", "tuned/merged")
            continue
        done = CliRunner().invoke(app, [*words, *FIRST_LOOK.get(words[0], [])])
        assert done.exit_code == 0, f"{line}\n{done.output}"


def test_the_reference_is_what_the_code_says():
    sys.path.insert(0, str(DOCS))
    import api_pages

    assert api_pages.FILE.read_text("utf-8") == api_pages.make_page(), "run `make docs`"
