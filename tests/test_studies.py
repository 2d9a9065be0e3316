"""Studies: tables in the docs are those of the kept results, and their errors are what they say they are."""

import math
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
if not (DOCS / "studies.py").exists():
    pytest.skip("an installed package has no docs beside it", allow_module_level=True)


@pytest.fixture(scope="module")
def studies():
    sys.path.insert(0, str(DOCS))
    try:
        import studies
    finally:
        sys.path.remove(str(DOCS))
    return studies


@pytest.mark.parametrize(
    ("page", "mark", "made"),
    [
        ("compose.md", "plans", "compose_table"),
        ("compose.md", "temperatures", "temperature_table"),
        ("search.md", "searched", "search_table"),
        ("search.md", "searches", "searches_table"),
    ],
)
def test_the_docs_show_what_was_measured(studies, page, mark, made):
    table = getattr(studies, made)()
    assert table.count("\n") > 5
    assert f"<!-- {mark} -->\n{table}\n<!-- /{mark} -->" in (DOCS / page).read_text(encoding="utf-8")


def test_an_error_is_the_larger_of_two(studies):
    def row(value, **more):
        return {"task": "loss", "value": value, "stderr": 0.1, "n": 4, **more}

    assert studies.figure([row(2.0)]) == (2.0, 0.1)
    assert studies.figure([row(2.0), row(2.02)]) == (pytest.approx(2.01), pytest.approx(0.1))
    assert studies.figure([row(1.0), row(3.0)]) == (2.0, pytest.approx(1.0))
    hits = [row(0.0, task="passkey"), row(0.0, task="passkey")]  # none of 8: two added each way, as Agresti and Coull
    assert studies.figure(hits) == (0.0, pytest.approx(math.sqrt(2 / 12 * 10 / 12 / 12)))


def test_every_arm_has_three_seeds(studies):
    """Passkeys of each seed at each length; text once for what is not trained."""
    rows = studies.read_rows("compose")
    for arm in {row["arm"] for row in rows}:
        keys = [(r["seed"], r["length"]) for r in rows if r["arm"] == arm and r["task"] == "passkey"]
        assert sorted(keys) == [(seed, length) for seed in range(3) for length in (256, 512, 1024, 2048)], arm


@pytest.mark.parametrize(("mark", "lines"), [("losses", 9), ("passkeys", 9), ("encoders", 9), ("tuning", 7)])
def test_the_page_on_real_models_shows_what_was_measured(studies, monkeypatch, mark, lines):
    monkeypatch.syspath_prepend(str(DOCS))
    import real_models

    table = getattr(real_models, f"{mark}_table")()
    assert len(table.splitlines()) == lines  # the head and six schemes with the unpatched model, or two models twice
    assert f"<!-- {mark} -->\n{table}\n<!-- /{mark} -->" in (DOCS / "study.md").read_text(encoding="utf-8")
