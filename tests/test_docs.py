"""Code and commands of the documentation: run as they stand, or marked with why not, and counted."""

import re
import shlex
import sys
from pathlib import Path

import pytest
from click.exceptions import UsageError
from typer.main import get_command

from hf_posenc.cli.main import app

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
PYTHON = re.compile(r"^(<!-- not run: .+ -->\n)?```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ELSEWHERE = {"README.md", "quickstart.md", "extending.md"}
"""Their code is run by test_readme.py and test_extending.py."""
NOT_RUN = {"index.md": 1, "trainers.md": 1, "encoders.md": 1}
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


def test_there_are_commands_to_look_at():
    assert len(commands()) > 40


def test_the_reference_is_what_the_code_says():
    sys.path.insert(0, str(DOCS))
    import api_pages

    assert api_pages.FILE.read_text("utf-8") == api_pages.made(), "run `make docs`"
