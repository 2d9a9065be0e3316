"""A hook of mkdocs: what the site shows besides the files of docs/."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
BESIDE = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
"""Pages of the site that stand at the root of the repository."""


def on_config(config: Any) -> Any:
    """Put the page of every scheme under their heading."""
    names = sorted(file.stem for file in (ROOT / "docs" / "schemes").glob("*.md") if file.stem != "README")
    pages = [{"All schemes": "schemes/README.md"}, *({name: f"schemes/{name}.md"} for name in names)]
    config.nav = [{"Schemes": pages} if "Schemes" in entry else entry for entry in config.nav]
    named = {*_pages(config.nav)}
    new = sorted(file.name for file in (ROOT / "docs").glob("*.md") if file.name not in named)
    if new:  # a page that nobody has put anywhere yet
        config.nav.append({"More": new})
    return config


def _pages(nav: list[Any]) -> Iterator[str]:
    for entry in nav:
        for value in entry.values():
            yield from _pages(value) if isinstance(value, list) else [value]


def on_files(files: Files, config: Any) -> Files:
    for page, source in BESIDE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        for other, name in BESIDE.items():
            text = text.replace(f"]({name})", f"]({other})")
        text = text.replace("](docs/", "](")
        files.append(File.generated(config, page, content=text))
    return files
