"""The report as a page, opened in a real Chromium: drawn, readable, whole, at desk and phone width, light and dark."""

import itertools
import math
import re

import pytest
from report_rows import ABOUT, LENGTHS, LOSSES, sample_rows

from hf_posenc.evaluation.measures.rows import Row
from hf_posenc.evaluation.report import write_report

WIDTHS = (1280, 390)
VISIBLE = "[...document.querySelectorAll('svg.chart')].filter(s => s.getBoundingClientRect().width > 0)"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "out.html"
    write_report(sample_rows(), path, ABOUT)
    return path


@pytest.mark.parametrize("width", WIDTHS)
def test_every_chart_is_drawn_within_the_page(browser, page, width):
    browser.open(page, width=width)
    charts = browser.run(
        f"{VISIBLE}.map(s => {{ const r = s.getBoundingClientRect(); return [r.left, r.right, r.height, "
        "s.querySelector('title').textContent, s.querySelectorAll('.curve, rect, .whisker').length]; })"
    )
    assert len(charts) == 2 + 1 + 1 + 9 + 1 + 1  # protocols, positions, shift, grids, harness, tax
    for left, right, height, title, parts in charts:
        assert left >= 0 and right <= width and right - left > 200 and height > 100, title
        assert parts > 0, title


@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_does_not_scroll_sideways(browser, page, width):
    browser.open(page, width=width)
    assert browser.run("innerWidth") == width
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run("Math.max(...[...document.querySelectorAll('main > *, header > *')]"
                       ".map(e => e.getBoundingClientRect().right))") <= width  # fmt: skip


@pytest.mark.parametrize("width", WIDTHS)
def test_words_in_a_chart_do_not_leave_it_or_cover_each_other(browser, page, width, least=200):
    browser.open(page, width=width)
    boxes = browser.run(
        f"{VISIBLE}.map(s => [...s.querySelectorAll('text')].map(t => {{ const r = t.getBoundingClientRect(); "
        "return [t.textContent, r.left, r.top + 2, r.right, r.bottom - 2]; }))"
    )
    assert sum(map(len, boxes)) > least
    for chart in boxes:
        for i, (words, left, top, right, bottom) in enumerate(chart):
            assert left >= 0 and right <= width, words
            for other, left2, top2, right2, bottom2 in chart[:i]:
                apart = right <= left2 or right2 <= left or bottom <= top2 or bottom2 <= top
                assert apart, f"{words!r} covers {other!r}"


def test_many_figures_off_the_scale_are_stacked_and_stay_apart(browser, tmp_path):
    rows = [
        Row(task="perplexity", protocol="last", scheme=f"scheme_with_a_very_long_name:option={i}", length=length,
            metric="loss", value=2 + 3 * i * (length > 300), stderr=0.1, n=4)
        for i in range(9)
        for length in (256, 320, 384, 448, 512, 640, 768, 1024)
    ]  # fmt: skip
    path = tmp_path / "out.html"
    write_report(rows, path, {"trained_length": 300})
    for width in WIDTHS:
        test_words_in_a_chart_do_not_leave_it_or_cover_each_other(browser, path, width, least=20)
        test_the_page_does_not_scroll_sideways(browser, path, width)


def test_a_curve_runs_through_its_points_on_a_log_axis(browser, page):
    """Measured in the browser: equal steps for doublings, and heights in proportion to the losses."""
    browser.open(page, width=1280)
    found = browser.run(
        f"(() => {{ const s = {VISIBLE}[0]; return [...s.querySelectorAll('[data-tip]')].filter(g => "
        "/^(linear|yarn) at/.test(g.dataset.tip)).map(g => { const r = g.querySelector('.mark')"
        ".getBoundingClientRect(); return [g.dataset.tip, r.left + r.width / 2, r.top + r.height / 2]; }); })()"
    )
    assert len(found) == 2 * len(LENGTHS)
    x = [place[1] for place in found[: len(LENGTHS)]]
    steps = [b - a for a, b in itertools.pairwise(x)]
    assert max(steps) - min(steps) < 1 and min(steps) > 50
    assert found[0][0] == "linear at 256: 2.574 ± 0.021 (n = 32)"
    heights = [place[2] for place in found]
    losses = [*LOSSES["linear"], *LOSSES["yarn"]]
    scale = (heights[-1] - heights[0]) / (losses[-1] - losses[0])
    for height, loss in zip(heights, losses, strict=True):
        assert height - heights[0] == pytest.approx(scale * (loss - losses[0]), abs=1.5)


def test_what_is_off_the_scale_is_said_above_it(browser, page):
    browser.open(page, width=1280)
    marks = browser.run(
        f"(() => {{ const s = {VISIBLE}[0]; const edge = s.querySelector('.torn').getBoundingClientRect().top; "
        "return [...s.querySelectorAll('[data-tip$=\"off the scale\"]')].map(g => "
        "[g.dataset.tip.split(':')[0], g.querySelector('text').textContent, "
        "g.getBoundingClientRect().bottom < edge]) })()"
    )
    assert ["unpatched at 2k", "↑7.482", True] in marks
    assert ["alibi at 2k", "↑∞", True] in marks
    assert len(marks) == 4


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_all_words_can_be_read(browser, page, width, dark):
    """WCAG AA: 4.5 to 1 of every text against what lies behind it, and 3 to 1 of curves and markers."""
    browser.open(page, width=width, dark=dark)
    paper = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (sum(rgb(paper)) < 150) is dark
    words = browser.run(
        "[...document.querySelectorAll('h1,h2,h3,h4,p,td,th,dt,dd,small,span,li,code,svg text')]"
        ".filter(e => e.getBoundingClientRect().width && e.textContent.trim()).map(e => { "
        "const c = getComputedStyle(e); "
        "const tile = e.matches('svg text.cell') && e.parentNode.querySelector('rect'); "
        "const behind = tile && getComputedStyle(tile).fill; let box = e; let back = 'rgba(0, 0, 0, 0)'; "
        "while (box && back === 'rgba(0, 0, 0, 0)') { back = getComputedStyle(box).backgroundColor; "
        "box = box.parentElement; } "
        "return [e.textContent.slice(0, 30), e.closest('svg') ? c.fill : c.color, behind || back]; })"
    )
    assert len(words) > 400
    bad = {(text, ink, back) for text, ink, back in words if contrast(rgb(ink), rgb(back)) < 4.5}
    assert not bad
    lines = browser.run(
        "[...document.querySelectorAll('svg .curve, svg .mark')].filter(e => e.getBoundingClientRect().width)"
        ".map(e => e.matches('.curve') ? getComputedStyle(e).stroke : getComputedStyle(e).fill)"
    )
    assert all(contrast(rgb(colour), rgb(paper)) >= 3 for colour in set(lines))


def test_nothing_is_fetched_and_nothing_complains(browser, page):
    for width in WIDTHS:
        browser.open(page, width=width)
        browser.run("new Promise(done => setTimeout(done, 200))")
        assert browser.requests() == [page.as_uri(), "data:,"] or browser.requests() == [page.as_uri()]
        assert browser.complaints() == []


def test_the_browser_would_tell_of_a_fetch_and_of_an_error(browser, page, tmp_path):
    """So that the test above can fail."""
    guilty = tmp_path / "guilty.html"
    guilty.write_text(
        page.read_text("utf-8") + '<img src="http://example.invalid/x.png"><script>oops()</script>', "utf-8"
    )
    browser.open(guilty, width=1280)
    assert "http://example.invalid/x.png" in browser.requests()
    assert any("oops" in said for said in browser.complaints())


def test_no_address_is_in_the_source(page):
    source = page.read_text("utf-8")
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!data:)|url\(|@import|https?:|//[a-z]+\.""", source)


def test_a_figure_is_shown_under_the_mouse_and_to_the_keyboard(browser, page):
    browser.open(page, width=1280)
    shown = "document.getElementById('tip').hidden ? null : document.getElementById('tip').textContent"
    assert browser.run(shown) is None
    x, y = browser.run(
        "(() => { const r = document.querySelector('svg.desk [data-tip^=\"linear at 1k\"]').getBoundingClientRect(); "
        "return [r.left + r.width / 2, r.top + r.height / 2]; })()"
    )
    browser.move_mouse(x, y)
    assert browser.run(shown) == "linear at 1k: 2.549 ± 0.033 (n = 32)"
    browser.move_mouse(2, 2)
    assert browser.run(shown) is None
    browser.press_tab()
    assert re.fullmatch(r"\w+ at \w+: [\d.]+ ± [\d.]+ \(n = 32\).*", browser.run(shown))


def test_it_opens_with_the_verdict_and_every_cell_has_its_n(browser, page):
    browser.open(page, width=1280)
    opening = browser.run("[...document.querySelectorAll('header p')].map(p => p.textContent)")
    assert opening[1] == ABOUT["verdict"] and "patched for 2k" in opening[2] and "2026-11-16" in opening[2]
    cells = browser.run("[...document.querySelectorAll('svg.heat text.count')].map(t => t.textContent)")
    assert len(cells) > 100 and set(cells) == {"n=20"}
    assert browser.run("document.querySelectorAll('svg.heat .axis-name').length") == 2 * 3  # once for each task


def test_the_table_is_sorted_by_its_heads(browser, page):
    browser.open(page, width=1280)
    browser.run("[...document.querySelectorAll('.full th button')].find(b => b.textContent === 'value').click()")
    column = "[...document.querySelectorAll('.full tbody tr')].map(r => r.cells[5].dataset.key)"
    values = [float(value) for value in browser.run(column)]
    assert values == sorted(values) and len(values) == len(sample_rows())
    browser.run("[...document.querySelectorAll('.full th button')].find(b => b.textContent === 'value').click()")
    assert [float(value) for value in browser.run(column)] == sorted(values, reverse=True)


def test_it_is_named_for_those_who_do_not_see_it(browser, page):
    browser.open(page, width=1280)
    assert browser.run("document.documentElement.lang") == "en"
    assert browser.run("[...document.querySelectorAll('svg.chart')].every(s => s.getAttribute('aria-labelledby')"
                       ".split(' ').every(id => document.getElementById(id).textContent.length > 3))")  # fmt: skip
    ids = browser.run("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))
    levels = browser.run("[...document.querySelectorAll('h1,h2,h3,h4')].map(h => Number(h.tagName[1]))")
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels))


def test_the_words_of_users_are_words(browser, tmp_path):
    evil = '<script>oops()</script><b onclick="x">&"\''
    rows = [
        Row(task="perplexity", protocol="last", scheme=evil, length=length, metric="loss", value=2.0, stderr=None, n=1,
            details={"note": evil})
        for length in (256, 512)
    ]  # fmt: skip
    path = tmp_path / "out.html"
    write_report(rows, path, {"model": evil, "title": evil, "command": evil, "versions": {evil: evil}})
    browser.open(path, width=390)
    assert browser.complaints() == []
    assert browser.run("document.querySelector('h1').textContent") == evil
    assert browser.run("document.querySelectorAll('b[onclick]').length") == 0
    assert browser.run("document.querySelector('[data-tip]').dataset.tip").startswith(evil)
    assert browser.run("document.documentElement.scrollWidth") <= 390


def test_one_figure_alone_or_none_that_is_finite_is_still_drawn(browser, tmp_path):
    for name, value in (("one", 2.5), ("nan", math.nan), ("inf", math.inf)):
        path = tmp_path / f"{name}.html"
        row = Row(task="perplexity", protocol="whole", scheme="yarn", length=4096, metric="loss", value=value,
                  stderr=math.nan, n=1)  # fmt: skip
        write_report([row], path, {})
        browser.open(path, width=390)
        assert browser.complaints() == []
        assert browser.run(f"{VISIBLE}.length") == 1
        assert browser.run("[...document.querySelectorAll('h2')].map(h => h.textContent)") == [
            "Loss against length", "Every figure", "How each number was made"
        ]  # fmt: skip
        drawn = browser.run(f"{VISIBLE}[0].querySelector('[data-tip] .mark').getBoundingClientRect().width")
        assert drawn > 5
        assert "nan" not in browser.run(f"{VISIBLE}[0].innerHTML").replace("NaN", "")


def test_it_prints(browser, page):
    browser.open(page, width=1280, dark=True)
    assert browser.printed().startswith(b"%PDF")
    browser.call("Emulation.setEmulatedMedia", media="print")
    try:
        assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert browser.run(
            "document.querySelector('.tall').scrollHeight <= document.querySelector('.tall').clientHeight"
        )
    finally:
        browser.call("Emulation.setEmulatedMedia", media="")


def rgb(colour: str) -> list[float]:
    return [float(part) for part in re.findall(r"[\d.]+", colour)[:3]]


def contrast(one: list[float], other: list[float]) -> float:
    """WCAG 2's, written anew from its text."""

    def luminance(colour: list[float]) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in colour)]
        return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
