"""A page for every scheme: it has an entry, sentences that fit, and is what the code would write now."""

import re
import sys
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest
from cells import tiny
from image_cells import tiny_images

from hf_posenc import describe, is_patched, patch_model
from hf_posenc.schemes import SCHEMES

DOCS = Path(__file__).parent.parent / "docs"
sys.path.insert(0, str(DOCS))

import scheme_pages  # noqa: E402
import scheme_pictures  # noqa: E402

NAMES = sorted(SCHEMES.built_in())
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@cache
def made():
    return scheme_pages.make_pages()


def test_every_scheme_has_an_entry_and_no_other_has_one():
    assert sorted(scheme_pages.about()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_an_entry_says_what_where_from_and_how(name):
    entry = scheme_pages.about()[name]
    assert len(re.findall(r"[.!](?= |$)", entry["does"])) == 3
    assert entry["formula"] and entry["paper"]
    assert 2017 <= entry["year"] <= 2026
    assert entry.get("url", "https://").startswith("https://")


def test_pages_are_what_the_code_would_write():
    """To the letter; pictures to a fifth of a pixel, since processors round differently. Else: run `make docs`."""
    files = {file.name for file in (DOCS / "schemes").iterdir()} - {"README.md", "about.toml"}
    assert files == set(made())
    for name, content in made().items():
        stored = (DOCS / "schemes" / name).read_text(encoding="utf-8")
        if name.endswith(".md"):
            assert stored == content, name
        else:
            same_picture(stored, content, name)
    assert scheme_pages.index() in (DOCS / "schemes" / "README.md").read_text(encoding="utf-8")


def same_picture(one, other, name):
    one, other = (re.sub(r"c[0-9a-f]{8}(?=[td][\" ])", "key", drawing) for drawing in (one, other))
    if "scale(" in one:  # cells of a map, whole numbers
        assert abs(len(one) - len(other)) < 0.02 * len(one), name
        return
    assert NUMBER.sub("#", one) == NUMBER.sub("#", other), name
    for a, b in zip(NUMBER.findall(one), NUMBER.findall(other), strict=True):
        assert abs(float(a) - float(b)) < 0.2, name


@pytest.mark.parametrize("name", NAMES)
def test_the_code_of_a_page_runs_as_it_stands(name):
    (code,) = re.findall(r"^```python\n(.*?)^```", made()[f"{name}.md"], flags=re.M | re.S)
    model = tiny_images("vit") if name == "axial_rope" else tiny("llama", max_position_embeddings=1024)
    exec(code, {"patch_model": patch_model, "model": model})
    assert is_patched(model) and describe(model).scheme == name


def test_every_scheme_is_drawn_and_every_drawing_is_told():
    for name in NAMES:
        drawn = [file for file in made() if file.startswith(f"{name}-")]
        assert drawn, name
        for file in drawn:
            root = ElementTree.fromstring(made()[file])
            assert [part.tag.rpartition("}")[2] for part in root][:2] == ["title", "desc"]
            assert "prefers-color-scheme:dark" in made()[file] and "nan" not in made()[file]
            assert f"({file})" in made()[f"{name}.md"]


def test_a_picture_counts_the_pairs_that_leave_their_range():
    """By hand: the pairs of plain RoPE whose waves are longer than the trained length are strained fourfold, those of
    linear interpolation never."""
    slow = sum(2 * 3.141592653589793 * 10_000 ** (i / 32) > scheme_pictures.TRAINED for i in range(32))
    assert f"{slow} of 32 pairs" in made()["rope.md"]
    assert "0 of 32 pairs" in made()["linear.md"]


def test_links_of_pages_lead_somewhere():
    for name, content in made().items():
        for target in re.findall(r"\]\(([^)#:]+)\)", content) if name.endswith(".md") else []:
            assert (DOCS / "schemes" / target).exists(), (name, target)
