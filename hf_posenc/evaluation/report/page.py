"""The report as an HTML page: charts, the table, and how each number was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from ..measures.rows import Row
from .curves import domain, line_chart, off_scale
from .drawing import SHAPES
from .explanations import ERRORS, task_title
from .provenance import about_items, task_entries
from .tiles import forest, heat_map
from .views import (
    Grid,
    Panel,
    figure,
    grids,
    length_label,
    loss_panels,
    plain_details,
    position_panels,
    scheme_order,
    score_panels,
    shift_panels,
    tax_rows,
    with_error,
)

HEAT = {
    "light": ((244, 241, 233), (120, 173, 209), (8, 69, 126)),
    "dark": ((36, 40, 46), (38, 96, 143), (140, 205, 250)),
}
"""Colours of accuracy 0, 0.5 and 1: one hue, readable for the colour-blind and in greyscale."""
INKS = ("#0a0c0e", "#ffffff")


def page(rows: Sequence[Row], about: Mapping[str, Any]) -> str:
    """The whole HTML."""
    styles = {scheme: i for i, scheme in enumerate(_style_order(rows))}
    trained = about.get("trained_length")
    sections = [
        _losses(loss_panels(rows), styles, trained, about.get("places") or {}),
        _positions(position_panels(rows), styles, trained),
        _shift(shift_panels(rows), styles, trained),
        _retrieval(grids(rows), styles),
        _scores(score_panels(rows), styles, trained),
        _tax(tax_rows(rows), styles),
        _table(rows),
        _how_made(rows, about),
    ]
    template = Template(resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(str(about.get("title", "How far does it read?"))),
        kicker=escape(_summary_line(rows)),
        verdict=f'<p class="verdict">{escape(str(about["verdict"]))}</p>\n' if about.get("verdict") else "",
        lede=_lede(rows, about),
        sections="\n".join(filter(None, sections)),
        footer=escape("Made by hf-posenc. This file is whole in itself and fetches nothing."),
        heat_light=heat_colours("light"),
        heat_dark=heat_colours("dark"),
        heat_rules=" ".join(
            f"rect.h{i} {{ fill: var(--h{i}); }} text.h{i} {{ fill: var(--t{i}); }}" for i in range(11)
        ),
    )


def heat_colours(mode: str) -> str:
    """Eleven colours of the heat map, each with the text colour of higher contrast."""
    low, middle, high = HEAT[mode]
    declared = []
    for i in range(11):
        start, end, share = (low, middle, i / 5) if i <= 5 else (middle, high, (i - 5) / 5)
        colour = tuple(round(a + (b - a) * share) for a, b in zip(start, end, strict=True))
        ink = max(INKS, key=lambda other: contrast(colour, tuple(bytes.fromhex(other[1:]))))
        declared.append(f"--h{i}: #{bytes(colour).hex()}; --t{i}: {ink};")
    return " ".join(declared)


def contrast(one: Sequence[int], other: Sequence[int]) -> float:
    """WCAG's contrast ratio of two colours, 1 to 21."""

    def luminance(colour: Sequence[int]) -> float:
        parts = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def _style_order(rows: Sequence[Row]) -> list[str]:
    """Style 0, grey, is reserved for the unpatched model."""
    order = scheme_order(rows)
    return order if order[0] == "unpatched" else ["unpatched", *order]


def _summary_line(rows: Sequence[Row]) -> str:
    schemes, lengths = scheme_order(rows), sorted({row.length for row in rows if row.task != "loss_by_position"})
    span = f"{length_label(lengths[0])} to {length_label(lengths[-1])} tokens" if len(lengths) > 1 else ""
    count = f"{len(schemes)} schemes" if len(schemes) > 1 else schemes[0]
    return ", ".join(filter(None, ("Long-context evaluation", count, span)))


def _lede(rows: Sequence[Row], about: Mapping[str, Any]) -> str:
    parts = []
    if about.get("model"):
        name = str(about["model"])
        parts.append(f"<b>{escape(Path(name).name if name.startswith(('/', '.', '~')) else name)}</b>")
    if about.get("trained_length"):
        parts.append(f"trained at {length_label(float(about['trained_length']))} tokens")
    if about.get("target_length"):
        parts.append(f"patched for {length_label(float(about['target_length']))}")
    if about.get("text"):
        parts.append(f"reading {escape(str(about['text']))}")
    if about.get("date"):
        parts.append(f"<time>{escape(str(about['date']))}</time>")
    return ", ".join(parts) + ("." if parts else f"{len(rows)} figures.")


def section(title: str, say: Sequence[str], body: str, cls: str = "") -> str:
    """A heading with its explanation, and the content beside it."""
    words = "".join(f"<p>{escape(sentence)}</p>" for sentence in say)
    key = title.lower().replace(" ", "-")
    return (
        f'<section class="{cls}" aria-labelledby="{key}"><div class="say"><h2 id="{key}">{escape(title)}</h2>{words}'
        f"</div><div>{body}</div></section>"
    )


def _key(style: int) -> str:
    return (
        f'<svg class="key" viewBox="-7 -7 14 14" aria-hidden="true"><path class="mark s{style % 7}" '
        f'd="{SHAPES[style % len(SHAPES)]}"/></svg>'
    )


def _legend(schemes: Sequence[str], styles: Mapping[str, int], cls: str) -> str:
    items = "".join(f"<li>{_key(styles[scheme])}{escape(scheme)}</li>" for scheme in schemes)
    return f'<ul class="legend {cls}">{items}</ul>'


def _chart(panel: Panel, styles: Mapping[str, int], trained: Any, x_name: str, marked: bool = True) -> str:
    """The chart twice: with names at the curves for wide screens, and with a legend for phones."""
    shared: dict[str, Any] = {"x_name": x_name, "trained": trained, "marked": marked}
    desk = line_chart(panel, styles, size=(824, 400), labels=True, cls="desk", **shared)
    phone = line_chart(panel, styles, size=(350, 320), labels=False, cls="phone", **shared)
    return desk + _legend([curve.scheme for curve in panel.curves], styles, "phone") + phone


def _losses(
    panels: Sequence[Panel], styles: Mapping[str, int], trained: Any, places: Mapping[tuple[str, str, int], str]
) -> str:
    say = [
        "Lower is better. A curve that stays flat or falls reads on; one that climbs has lost its place.",
        "Bands and bars are one standard error.",
    ]
    if any(off_scale(panel, domain(panel)[1]) for panel in panels):
        say.append("Arrows above the dashed line are figures off the scale.")
    if places:
        say.append("In brackets: the range of ranks compatible with the error bars.")
    figures = [
        f"<figure>{_caption(f'Protocol: {panel.protocol}', panel.note)}"
        f"{_chart(panel, styles, trained, 'length, tokens')}{_matrix(panel, places)}</figure>"
        for panel in panels
    ]
    return section("Loss against length", say, "".join(figures)) if figures else ""


def _matrix(panel: Panel, places: Mapping[tuple[str, str, int], str]) -> str:
    """The figures of a chart, one line for each scheme."""
    lengths = sorted({point.x for point in panel.points})
    head = "".join(f'<th scope="col" class="num">{length_label(length)}</th>' for length in lengths)
    body = ""
    for curve in panel.curves:
        at = {point.x: point for point in curve.points}
        cells = ""
        for length in lengths:
            place = places.get((panel.protocol, curve.scheme, int(length)))
            shown = _value(at.get(length), panel.metric) + (f" ({escape(place)})" if place else "")
            cells += f'<td class="num">{shown}</td>'
        body += f'<tr><th scope="row">{escape(curve.scheme)}</th>{cells}</tr>'
    label = f"{panel.metric}, {panel.protocol}"
    head = f'<thead><tr><th scope="col">{escape(panel.metric)}</th>{head}</tr></thead>'
    return in_scroll_box(f"<table>{head}<tbody>{body}</tbody></table>", label, "matrix")


def _value(point: Any, metric: str) -> str:
    if point is None:
        return "–"  # noqa: RUF001
    shown, plus, error = with_error(point.value, point.stderr, metric).partition(" ± ")
    return f"{shown} <small>± {error}</small>" if plus else shown


def _caption(title: str, note: str = "") -> str:
    aside = f" <span>{escape(note)}</span>" if note else ""
    return f"<figcaption><h3>{escape(title)}{aside}</h3></figcaption>"


def in_scroll_box(table: str, label: str, cls: str = "") -> str:
    """A table in a scrolling box, so that the page itself never scrolls sideways."""
    return f'<div class="scroll {cls}" role="region" tabindex="0" aria-label="{escape(label)}">{table}</div>'


def _positions(panels: Sequence[Panel], styles: Mapping[str, int], trained: Any) -> str:
    say = [
        "One pass over each window, every token scored. A healthy curve falls with the context that a token has; a "
        "jump shows the position from which the model is lost.",
    ]
    figures = [
        f"<figure>{_caption(panel.note.capitalize())}"
        f"{_chart(panel, styles, trained, 'position in the window', marked=False)}</figure>"
        for panel in panels
    ]
    return section("Loss by position", say, "".join(figures)) if figures else ""


def _shift(panels: Sequence[Panel], styles: Mapping[str, int], trained: Any) -> str:
    say = [
        "The same passages, read after an unrelated text and a gap in the positions that ends at the length. Nothing "
        "but the distance changes: a flat curve means sound positions, a climbing one broken ones.",
    ]
    figures = [f"<figure>{_chart(panel, styles, trained, 'length, tokens')}</figure>" for panel in panels]
    return section("Shift", say, "".join(figures)) if figures else ""


def _retrieval(found: Sequence[Grid], styles: Mapping[str, int]) -> str:
    say = [
        "Share of right answers by how deep the answer lies in the text (0 % is its beginning) and how long the text "
        "is. 1 is perfect; below it the number of trials.",
    ]
    figures = ""
    for task, protocol in dict.fromkeys((grid.task, grid.protocol) for grid in found):
        own = [grid for grid in found if (grid.task, grid.protocol) == (task, protocol)]
        maps = "".join(
            f"<div><h4>{_key(styles[grid.scheme])}{escape(grid.scheme)}</h4>{heat_map(grid, named=not i)}</div>"
            for i, grid in enumerate(own)
        )
        chance = f", guessing gives {own[0].chance}" if own[0].chance else ""
        caption = _caption(task_title(task), f"scored by {protocol}{chance}")
        figures += f'<figure>{caption}<div class="multiples">{maps}</div></figure>'
    scale = '<p class="scale" aria-hidden="true">0 <i></i> 1</p>'
    return section("Retrieval by depth", say, figures + scale) if figures else ""


def _scores(panels: Sequence[Panel], styles: Mapping[str, int], trained: Any) -> str:
    say = ["Scores that have a length and no depth. 1 is perfect; bands are one standard error."]
    shared: dict[str, Any] = {"size": (380, 270), "labels": False, "x_name": "length, tokens"}
    figures = [
        f"<figure>{_caption(task_title(panel.task), panel.protocol)}"
        f"{line_chart(panel, styles, trained=trained, **shared)}</figure>"
        for panel in panels
    ]
    schemes = dict.fromkeys(curve.scheme for panel in panels for curve in panel.curves)
    body = f'{_legend(list(schemes), styles, "")}<div class="multiples broad">{"".join(figures)}</div>'
    return section("Scores against length", say, body) if figures else ""


def _tax(rows: Sequence[Row], styles: Mapping[str, int]) -> str:
    if not rows:
        return ""
    say = [
        "What a scheme costs at lengths that the model was trained for: its loss minus the unpatched model’s, on the "  # noqa: RUF001
        "same windows. Right of zero is worse.",
    ]
    charts = forest(rows, styles, width=824, cls="desk") + forest(rows, styles, width=350, cls="phone")
    body = f"<figure>{charts}</figure>"
    return section("Short-context tax", say, body)


COLUMNS = ("task", "protocol", "scheme", "length", "metric", "value", "s.e.", "n", "made from")
NUMERIC = ("length", "value", "s.e.", "n")


def _table(rows: Sequence[Row]) -> str:
    heads = "".join(
        f'<th scope="col"{_numeric(name)}><button type="button">{escape(name)}</button></th>' for name in COLUMNS
    )
    body = "".join(_table_row(row) for row in rows)
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"
    say = [f"All {len(rows)} rows. The heads sort it."]
    aside = '<p class="phone">It goes on to the right.</p>'
    return section("Every figure", say, aside + in_scroll_box(table, "every figure", "full tall"), "wide")


def _numeric(name: str) -> str:
    return ' class="num"' if name in NUMERIC else ""


def _table_row(row: Row) -> str:
    error = "" if row.stderr is None else figure(row.stderr, row.metric)
    how = "; ".join(f"{key} {value}" for key, value in plain_details(row).items())
    cells = (row.task, row.protocol, row.scheme, f"{row.length:,}", row.metric, figure(row.value, row.metric), error)
    keys: dict[int, Any] = {3: row.length, 5: row.value, 6: -1 if row.stderr is None else row.stderr, 7: row.n}
    drawn = ""
    for i, cell in enumerate((*cells, f"{row.n:,}")):
        key = f' data-key="{keys[i]}"' if i in keys else ""
        drawn += f"<td{_numeric(COLUMNS[i])}{key}>{escape(cell)}</td>"
    return f'<tr>{drawn}<td class="how">{escape(how)}</td></tr>'


def _command(words: str) -> str:
    """A command that wraps between words, not at the hyphens of options."""
    return " ".join(f"<span>{escape(word)}</span>" for word in words.split(" "))


def _how_made(rows: Sequence[Row], about: Mapping[str, Any]) -> str:
    told = "".join(
        f"<dt>{escape(entry.name)}</dt><dd>{escape(entry.words)}<small>{escape(entry.counts)}</small></dd>"
        for entry in task_entries(rows)
    )
    body = f'<dl class="made">{told}<dt>errors</dt><dd>{escape(ERRORS)}</dd></dl>'
    if about.get("command"):
        body += f"<h3>The command</h3><pre><code>{_command(str(about['command']))}</code></pre>"
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in about_items(about))
    if items:
        body += f'<h3>Where it ran</h3><dl class="made">{items}</dl>'
    return section("How each number was made", [], body)
