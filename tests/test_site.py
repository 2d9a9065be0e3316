"""The documentation as a site: its menu names pages that are there, and it builds strictly and fetches nothing."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent


def leaves(nav):
    for entry in nav:
        for value in entry.values():
            yield from leaves(value) if isinstance(value, list) else [value]


def test_the_menu_names_pages_that_are_there():
    """A page that it does not name stands at its end."""
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    beside = {"changelog.md", "contributing.md"}  # from the root of the repository
    pages = {file.name for file in (ROOT / "docs").glob("*.md")}
    named = list(leaves(settings["nav"]))
    assert len(named) == len(set(named)) > 15
    assert set(named) - pages - beside == {"schemes/"}


def test_the_site_builds_strictly_and_fetches_nothing(tmp_path):
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed: pip install '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 50
    for page in pages:
        found = re.findall(
            r"""(?:<script[^>]+src|<img[^>]+src|<link[^>]+stylesheet[^>]+href)=["']?https?:""", page.read_text()
        )
        assert found == [], page.name
        assert 'data-md-component="source"' not in page.read_text(), page.name  # it asks GitHub for stars
