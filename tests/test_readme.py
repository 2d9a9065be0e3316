"""The door of the project: its code runs as it stands, its figures are those of the docs, its links lead somewhere."""

import re
import sys
from pathlib import Path

import pytest

from hf_posenc.schemes import SCHEMES

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")
OURS = "https://github.com/hf-posenc/hf-posenc/blob/main/"
sys.path.insert(0, str(DOCS))


def code(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S)


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_code_runs_as_it_stands_without_a_network(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (block,) = code((ROOT / page).read_text(encoding="utf-8"))
    names: dict[str, object] = {}
    exec(compile(block, page, "exec"), names)
    said = capsys.readouterr().out.strip()
    if page == "README.md":
        assert names["question"]["input_ids"].shape[1] == 663  # past the trained length, as it says
        assert said.startswith("yellow.") and said.endswith("48213")  # as the comments say
    else:
        assert len(said) > 20


def test_the_readme_fits_two_screens():
    assert len(README.partition("\n[changelog]: ")[0].splitlines()) <= 90


def test_the_readme_counts_its_schemes():
    (said,) = re.findall(r"(\d+) schemes", README)
    assert int(said) == len(SCHEMES.built_in())
    for name in re.findall(r"`([a-z_0-9]+)`", README.partition("## Which scheme?")[2].partition("## Install")[0]):
        assert name in SCHEMES


def test_links_of_the_readme_lead_somewhere():
    defined = dict(re.findall(r"^\[(\w+)\]: (\S+)$", README, flags=re.M))
    used = set(re.findall(r"\]\[(\w+)\]", README))
    assert used == set(defined)
    for target in defined.values():
        assert target.startswith(OURS) and (ROOT / target.removeprefix(OURS)).exists(), target
    pictures = re.findall(r"!\[.*?\]\(https://raw\.githubusercontent\.com/hf-posenc/hf-posenc/main/(\S+)\)", README)
    assert pictures == ["docs/hero.svg", "docs/report.png"] and all((ROOT / picture).exists() for picture in pictures)


def test_figures_of_a_real_model_are_those_of_the_study():
    study = (DOCS / "study.md").read_text(encoding="utf-8").partition("<!-- losses -->")[2].partition("<!-- /")[0]
    head, figures = re.search(r"^(\| unpatched .*)\n\|[-|]+\n(\|.*)$", README, flags=re.M).groups()
    for scheme, figure in zip(head.strip("| ").split(" | "), figures.strip("| ").split(" | "), strict=True):
        (row,) = re.findall(
            rf"^\| {re.escape(scheme)} \|(?: [\d.]+ ± [\d.]+ \|){{3}} ([\d.]+ ± [\d.]+) \|", study, flags=re.M
        )
        assert row == figure


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_links_of_the_docs_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_the_chart_shows_the_figures_of_the_demo():
    import hero

    assert (DOCS / "hero.svg").read_text(encoding="utf-8") == hero.draw()
    lengths, found = hero.figures()
    assert lengths == [256, 512, 1024]
    assert found["unpatched"][2] > 40 and max(found["`yarn`, untrained"]) < 9


def test_every_scheme_of_the_demo_has_a_row():
    from hf_posenc.training.demo import SCHEMES

    rows = re.findall(r"^\| `(\w+)`, untrained \|", (DOCS / "demo.md").read_text(encoding="utf-8"), flags=re.M)
    assert sorted(rows) == sorted(SCHEMES)


def test_commands_of_the_readme_are_known():
    from typer.main import get_command

    from hf_posenc.cli.main import app

    known = set(get_command(app).commands)
    said = set(re.findall(r"hf-posenc ([a-z][a-z-]+)", README + (DOCS / "quickstart.md").read_text(encoding="utf-8")))
    assert said - known == set()
