"""Reports as files: the right format, the right figures, whole or not at all."""

import io
import itertools
import math
import sys

import pytest
from report_rows import ABOUT, LENGTHS, LOSSES, sample_rows

from hf_posenc import PosencError
from hf_posenc.evaluation import report
from hf_posenc.evaluation.measures.rows import Row
from hf_posenc.evaluation.report.curves import apart, domain, line_chart, off_scale
from hf_posenc.evaluation.report.drawing import digits, ticks
from hf_posenc.evaluation.report.views import figure, grids, length_label, loss_panels, score_panels, with_error


def row(**changes) -> Row:
    fields = {"task": "perplexity", "protocol": "last", "scheme": "yarn", "length": 512, "metric": "loss",
              "value": 2.5, "stderr": 0.1, "n": 4}  # fmt: skip
    return Row(**{**fields, **changes})


@pytest.mark.parametrize("suffix, start", [(".html", b"<!DOCTYPE html>"), (".md", b"# How far"), (".png", b"\x89PNG")])
def test_the_suffix_says_what_is_written(tmp_path, suffix, start):
    path = tmp_path / "new" / f"out{suffix}"
    report.write(sample_rows(), path, ABOUT)
    assert path.read_bytes().startswith(start)
    assert [file.name for file in path.parent.iterdir()] == [path.name]  # nothing is left of how it was written


@pytest.mark.parametrize("name", ["out.pdf", "out", "report.json"])
def test_another_suffix_is_refused_with_those_that_do(tmp_path, name):
    with pytest.raises(PosencError, match=r"\.html, \.png, \.md"):
        report.write(sample_rows(), tmp_path / name, {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", [".html", ".md", ".png"])
def test_no_rows_are_no_report(tmp_path, suffix):
    with pytest.raises(PosencError, match="nothing to report"):
        report.write([], tmp_path / f"out{suffix}", {})


@pytest.mark.parametrize("suffix", [".html", ".md", ".png"])
def test_a_report_that_fails_leaves_the_old_one(tmp_path, suffix):
    class Broken:
        def __str__(self):
            raise RuntimeError("broken")

    path = tmp_path / f"out{suffix}"
    path.write_text("old")
    with pytest.raises(RuntimeError):
        report.write(sample_rows(), path, {"title": Broken()})
    assert path.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_directory_is_not_written_over(tmp_path):
    folder = tmp_path / "out.md"
    folder.mkdir()
    with pytest.raises(PosencError, match="is a directory"):
        report.write(sample_rows(), folder, {})


def test_the_same_rows_give_the_same_page(tmp_path):
    for name in ("one.html", "two.html"):
        report.write(sample_rows(), tmp_path / name, ABOUT)
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()


def test_a_picture_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not there
    for name in [name for name in sys.modules if name.startswith("matplotlib.")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "hf_posenc.evaluation.report.picture", raising=False)
    with pytest.raises(PosencError, match=r"pip install 'hf-posenc\[eval\]'"):
        report.write(sample_rows(), tmp_path / "out.png", {})


def test_the_picture_has_something_in_it(tmp_path):
    image = pytest.importorskip("PIL.Image")
    rows = [*sample_rows(), row(scheme="$odd^", length=1024, value=math.nan, stderr=None)]
    report.write(rows, tmp_path / "out.png", ABOUT)
    drawn = image.open(io.BytesIO((tmp_path / "out.png").read_bytes())).convert("RGB")
    assert drawn.width > 1500 and len(drawn.getcolors(1 << 24)) > 500


def test_markdown_has_every_figure_and_how_it_was_made(tmp_path):
    report.write(sample_rows(), tmp_path / "out.md", ABOUT)
    text = (tmp_path / "out.md").read_text("utf-8")
    assert "| unpatched | 2.312 ± 0.021 | 4.871 ± 0.027 | 6.935 ± 0.033 | 7.482 ± 0.045 |" in text
    assert "| alibi | 2.981 ± 0.021 | 3.012 ± 0.027 | 3.094 ± 0.033 | ∞ |" in text
    assert "| 0 % | 1.00 (20) | 0.33 (20) | 0.33 (20) | - |" in text
    assert text.splitlines()[2] == ABOUT["verdict"] and "## Shift" in text
    assert "| linear | 128 | +0.310 ± 0.008 | 32 |" in text
    assert text.count("| niah_single_1 | lm-eval |") == 2 * len(LENGTHS)
    for words in ("The same last tokens", "moves over the text by its stride", ABOUT["command"], "torch 2.13.0"):
        assert words in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert len(tables) > len(sample_rows())


def test_markdown_keeps_words_within_their_cells(tmp_path):
    report.write([row(scheme="a|b\n<script>", details={"note": "x|y"})], tmp_path / "out.md", {"model": "<b>"})
    text = (tmp_path / "out.md").read_text("utf-8")
    assert "<script>" not in text and "<b>" not in text
    assert "a\\|b &lt;script>" in text


def test_a_kind_of_rows_that_is_missing_leaves_its_section_out(tmp_path):
    report.write([row()], tmp_path / "out.html", {})
    page = (tmp_path / "out.html").read_text("utf-8")
    assert "Loss against length" in page
    assert not any(title in page for title in ("Short-context tax</h2>", "Retrieval by depth", "Loss by position"))


def test_arrows_are_spoken_of_where_there_are_some(tmp_path):
    report.write([row()], tmp_path / "flat.html", {})
    report.write(sample_rows(), tmp_path / "out.html", {})
    told = ["Arrows above" in (tmp_path / name).read_text("utf-8") for name in ("flat.html", "out.html")]
    assert told == [False, True]


def test_errors_of_many_curves_are_bars_that_do_not_cover_each_other():
    few, many = ("yarn", "ntk"), tuple(LOSSES)
    for schemes, bars in ((few, False), (many, True)):
        panel = loss_panels([r for r in sample_rows() if r.scheme in schemes])[0]
        drawn = line_chart(panel, {s: i for i, s in enumerate(schemes)}, size=(800, 400), labels=True, x_name="x")
        assert ('class="whisker"' in drawn, 'class="band"' in drawn) == (bars, not bars)


def test_perplexity_is_shown_where_no_loss_was_kept():
    (panel,) = loss_panels([row(metric="perplexity", value=9.0), row(metric="perplexity", value=11.0, length=1024)])
    assert panel.metric == "perplexity"
    (panel,) = loss_panels([row(metric="perplexity", value=9.0), row()])
    assert (panel.metric, len(panel.points)) == ("loss", 1)


def test_strides_are_not_mixed_in_one_chart():
    panels = loss_panels([row(protocol="sliding", details={"stride": stride}) for stride in (128, 256)])
    assert [panel.note for panel in panels] == ["stride 128", "stride 256"]


def test_cells_of_several_seeds_are_pooled_by_their_trials():
    made = [
        row(task="passkey", metric="accuracy", value=v, n=n, details={"depth": 0.5}) for v, n in ((1.0, 30), (0.0, 10))
    ]
    (grid,) = grids([*made, row(task="passkey", metric="accuracy", details={"depth": 0.0})])
    assert grid.depths == (0.0, 50.0)
    assert (grid.cells[50.0, 512].value, grid.cells[50.0, 512].n) == (0.75, 40)


def test_one_depth_alone_is_a_curve_and_no_map():
    made = [row(task="first_sentence", metric="accuracy", length=n, details={"depth": 0.0}) for n in (512, 1024)]
    assert not grids(made)
    assert len(score_panels(made)[0].points) == 2


def test_depths_in_percent_stay_as_they_are():
    made = [row(task="passkey", metric="accuracy", details={"depth": depth}) for depth in (0, 50, 100)]
    assert grids(made)[0].depths == (0.0, 50.0, 100.0)


@pytest.mark.parametrize(
    "value, metric, shown",
    [
        (2.34567, "loss", "2.346"),
        (math.nan, "loss", "NaN"),
        (math.inf, "perplexity", "∞"),
        (-0.25, "loss", "−0.250"),  # noqa: RUF001
        (0.5, "accuracy", "0.50"),
        (-0.00001, "loss", "0.000"),
        (1234.5, "perplexity", "1,234.50"),
        (1e7, "perplexity", "1e+07"),
    ],
)
def test_numbers_are_written_for_reading(value, metric, shown):
    assert figure(value, metric) == shown


def test_an_error_that_is_not_known_is_not_made_up():
    assert with_error(2.0, None) == with_error(2.0, math.nan) == "2.000"
    assert with_error(2.0, 0.0) == "2.000 ± 0.000"


@pytest.mark.parametrize("length, label", [(256, "256"), (1024, "1k"), (1536, "1.5k"), (16384, "16k"), (5000, "5000")])
def test_lengths_are_short(length, label):
    assert length_label(length) == label


@pytest.mark.parametrize("low, high", [(2.1, 3.3), (0.0, 1.0), (-0.02, 0.31), (6.0, 6.01), (5.0, 5.0), (0.0, 2e6)])
def test_ticks_are_round_and_cover(low, high):
    marks = ticks(low, high)
    assert marks[0] <= low + 1e-9 and marks[-1] >= high - 1e-9 and 2 <= len(marks) <= 9
    shown = [f"{mark:.{digits(marks)}f}" for mark in marks]
    assert len(set(shown)) == len(marks)
    assert all(float(words) == pytest.approx(mark, abs=1e-6) for words, mark in zip(shown, marks, strict=True))


def test_an_explosion_does_not_flatten_the_rest():
    (panel,) = loss_panels([row(), row(length=1024, value=2.7), row(scheme="none", length=1024, value=9.0)])
    low, high = domain(panel)
    assert 2.0 < low < 2.4 and 2.8 <= high < 3.1
    assert [(scheme, point.value) for scheme, point in off_scale(panel, high)] == [("none", 9.0)]


def test_labels_are_moved_apart_and_stay_above_the_axis():
    moved = apart([10, 11, 12, 95, 99], 16, 100)
    assert all(b - a >= 16 for a, b in itertools.pairwise(moved))
    assert moved[-1] <= 100 and moved[0] == 10
