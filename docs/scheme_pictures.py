"""Pictures of what each scheme does, drawn from its effect on a model of a common shape."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from plots import Axis, Curve, chart, heat, picture_file
from torch import Tensor

from hf_posenc.core.biases import Bias
from hf_posenc.core.effects import CoordinateRotation, Effect, FollowingRotation, Geometry, LateRotation, Rotation
from hf_posenc.core.patterns import Pattern
from hf_posenc.core.relative import RelativeTerms
from hf_posenc.core.tables import ComputedTable
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.report.drawing import line, text
from hf_posenc.families import FAMILIES
from hf_posenc.patching.grades import KINDS, sample_geometry
from hf_posenc.schemes import SCHEMES, Scheme
from hf_posenc.schemes.frequencies import default_frequencies
from hf_posenc.schemes.learned import RESIZE

TRAINED, FACTOR = 1024, 4
TARGET = TRAINED * FACTOR
THETA, CHANNELS = 10_000.0, 64
SMALL = 32
"""Tokens of the text in which pictures show single keys."""
BASES = (100.0, 1000.0, 10_000.0, 500_000.0)


class Picture(NamedTuple):
    """An SVG, its name beside that of the scheme, and a line below it."""

    name: str
    svg: str
    caption: str


def pictures(name: str) -> list[Picture]:
    """Those that a scheme has something to show in."""
    scheme = _scheme(name, {"factor": float(FACTOR)} if SCHEMES[name].extends else {})
    geometry, effect = _first_that_works(scheme)
    shown = _scheme(name, dict(SCHEMES[name].example))
    small = replace(geometry, trained_length=SMALL // 2)
    found: list[Picture] = []
    if isinstance(effect.rotation, CoordinateRotation):
        found += _on_images(effect.rotation)
    elif effect.rotation is not None and not isinstance(effect.rotation, LateRotation) and effect.pattern is None:
        found += _rotations(effect.rotation, scheme)
    if effect.bias is not None:
        found += _biases(effect.bias, shown, geometry)
    if effect.pattern is not None:
        found += _patterns(shown.effect_on(small).pattern, isinstance(effect.rotation, LateRotation))
    if name in EXTRA:
        found += EXTRA[name]()
    elif effect.table is not None and effect.pattern is None:
        found += _tables(effect)
    return found


def _scheme(name: str, options: dict[str, object]) -> Scheme:
    return SCHEMES[name].from_options(options)


def _first_that_works(scheme: Scheme) -> tuple[Geometry, Effect]:
    for family in KINDS.values():
        geometry = sample_geometry(FAMILIES[family])
        try:
            return geometry, scheme.effect_on(geometry)
        except PosencError:
            continue
    raise PosencError(f"{scheme.name!r} has an effect on no kind of model.")


def _frequencies(rotation: Rotation) -> list[float]:
    """Those of a query that sees the whole target."""
    if not isinstance(rotation, FollowingRotation):
        return list(rotation.inv_freq)
    grown = float(rotation.growth(rotation.stage(torch.tensor(TARGET))))
    return [f * math.exp(-grown * w) for f, w in zip(rotation.inv_freq, rotation.weights, strict=True)]


def _rotations(rotation: Rotation, scheme: Scheme) -> Iterator[Picture]:
    before, after = default_frequencies(CHANNELS, THETA), _frequencies(rotation)
    pairs = list(range(len(before)))
    still = [i for i, f in enumerate(after) if f == 0]
    moving = [i for i in pairs if i not in still]
    own = [Curve("plain RoPE", pairs, [2 * math.pi / f for f in before])]
    if scheme.name != "rope":
        own.append(Curve(scheme.name, moving, [2 * math.pi / after[i] for i in moving]))
    edges = {f"trained, {TRAINED:,}": float(TRAINED), f"target, {TARGET:,}": float(TARGET)}
    stopped = f" The {len(still)} slowest pairs do not rotate." if still else ""
    yield Picture(
        "wavelengths",
        chart(
            "Tokens that each pair takes for a whole turn",
            f"Wavelength of every rotary pair, plain and with {scheme.name}.",
            own,
            Axis("pair, fast to slow", low=0, high=len(pairs)),
            Axis("wavelength, tokens", log=True),
            edges,
        ),
        f"Wavelengths per pair, before and after.{stopped}",
    )

    def turns(frequencies: list[float], tokens: int) -> list[float]:
        return [min(1.0, tokens * f / (2 * math.pi)) for f in frequencies]

    seen, asked = turns(list(before), TRAINED), turns(after, TARGET)
    beyond = sum(a > s * 1.001 for s, a in zip(seen, asked, strict=True))
    yield Picture(
        "turns",
        chart(
            "Share of a turn: seen in training, and asked for at the target",
            "Share of a whole turn of each pair within the trained length and within the target length.",
            [Curve(f"seen at {TRAINED:,}", pairs, seen), Curve(f"asked at {TARGET:,}", pairs, asked)],
            Axis("pair, fast to slow", low=0, high=len(pairs)),
            Axis("share of a turn", low=0, high=1),
            {},
        ),
        f"{beyond} of {len(pairs)} pairs reach angles at {TARGET:,} tokens that training at {TRAINED:,} never did.",
    )


def _on_images(rotation: CoordinateRotation) -> Iterator[Picture]:
    side = 28
    places = torch.tensor([[float(x), float(y)] for y in range(side) for x in range(side)])
    angles = rotation(0, places)[0].detach()
    for pair, along in ((2, "column"), (angles.shape[1] // 2 + 2, "row")):
        values = angles[:, pair].cos().view(side, side).tolist()
        title = f"Cosine of the angle of pair {pair}, by patch"
        yield Picture(
            along, heat(title, title, values, "column", "row"), f"Pair {pair} rotates with the {along} of a patch."
        )


def _biases(bias: Bias, shown: Scheme, geometry: Geometry) -> Iterator[Picture]:
    if isinstance(bias, RelativeTerms):
        yield _terms(bias)
        return
    if bias.of_content:
        drawn = shown.effect_on(geometry).bias
        assert drawn is not None
        states = torch.randn(1, 129, geometry.hidden_size, generator=torch.Generator().manual_seed(0)) * 0.1
        said = drawn(states, 0)[0].detach()
        sums = [said[:, 129 - d :].sum(1) for d in range(129)]
        curves = [Curve(f"head {h}", list(range(129)), [float(s[h]) for s in sums]) for h in range(0, 8, 2)]
        caption = (
            "What is forgotten between a key and the last query of a random text, with gates that are open a little."
        )
    elif bias.of_distance:
        distances = torch.arange(257)
        numbers = bias.numbers(-distances).detach()
        heads = range(0, len(numbers), 2)
        curves = [Curve(f"head {h}", distances.tolist(), numbers[h].tolist()) for h in heads]
        caption = "The bias of a key so many tokens before the query, as the scheme starts, for four of eight heads."
    else:
        curves = [_from(bias, position) for position in (256, 512, 1024, 2048)]
        caption = "The bias of head 0 for queries at several positions, as the scheme starts."
    x, y = Axis("distance, tokens", low=0), Axis("added to the score")
    yield Picture("bias", chart("Bias against distance", caption, curves, x, y, {}), caption)


def _from(bias: Bias, position: int) -> Curve:
    distances = torch.arange(0, position + 1, max(position // 128, 1))
    values = bias(torch.tensor([[float(position)]]), (position - distances)[None].float())[0, 0, 0].detach()
    return Curve(f"query at {position}", distances.tolist(), values.tolist())


def _terms(bias: RelativeTerms) -> Picture:
    terms = bias(0, -40, 40)
    rows = terms.rows(torch.arange(-40, 41))
    values = terms.keys[0].detach()[rows][:, :CHANNELS].tolist()
    title = "The vector of each distance (key - query from -40 to 40)"
    return Picture(
        "vectors",
        heat(title, title, values, "channel", "distance, -40 to 40"),
        "The vector that queries are multiplied with, for each distance, as the scheme starts.",
    )


def _told(pattern: Pattern, tokens: int) -> Tensor:
    """The distance at which each query takes each key to be; NaN where it does not see it."""
    positions = torch.arange(tokens)[None]
    told = torch.full((tokens, tokens), math.nan)
    for zone in pattern.zones(positions, positions):
        apart = (zone.query[:, :, None] - zone.key[:, None, :])[0].float()
        told = torch.where(zone.seen.expand(1, tokens, tokens)[0], apart, told)
    return told


def _patterns(pattern: Pattern | None, remapped: bool) -> Iterator[Picture]:
    assert pattern is not None
    told = _told(pattern, SMALL)
    values = [[0.0 if math.isnan(d) else 8.0 + abs(d) for d in row] for row in told.tolist()]
    title = f"Which keys a query sees, in a text of {SMALL} tokens"
    yield Picture(
        "keys", heat(title, title, values, "key", "query"), "The stronger the colour, the further away the key seems."
    )
    if remapped:
        last = [(SMALL - 1 - n, float(d)) for n, d in enumerate(told[-1]) if not math.isnan(float(d))][::-1]
        true = list(range(SMALL))
        curves = [
            Curve("true", true, [float(t) for t in true]),
            Curve("told", [d for d, _ in last], [d for _, d in last]),
        ]
        yield Picture(
            "distances",
            chart(
                "Distance that RoPE is told, against the true one",
                "Of the keys that the last query sees.",
                curves,
                Axis("true distance, tokens", low=0),
                Axis("told", low=0),
                {"trained": float(SMALL // 2)},
            ),
            f"A small example: a model trained at {SMALL // 2} tokens reads {SMALL}.",
        )


def _tables(effect: Effect) -> Iterator[Picture]:
    assert effect.table is not None and not hasattr(effect.table, "image_size")
    table = effect.table.module(None, torch.zeros(1))
    assert isinstance(table, ComputedTable)
    values = table.vectors(torch.arange(64)[:, None])[:, :80].detach().tolist()
    title = "The table: positions 0 to 63, the first 80 channels"
    yield Picture(
        "table", heat(title, title, values, "channel", "position"), "What is added to the input, by position."
    )


def _products(adds: bool) -> Picture:
    """The mean of cos(d f) over pairs: the inner product of sinusoids, or of a vector rotated to two places."""
    distances = list(range(0, 257))
    curves = []
    for base in BASES:
        frequencies = default_frequencies(CHANNELS, base)
        values = [sum(math.cos(d * f) for f in frequencies) / len(frequencies) for d in distances]
        curves.append(Curve(f"base {base:,.0f}", distances, values))
    of = "two position vectors" if adds else "a query and an equal key"
    title = f"Inner product of {of} against distance"
    return Picture(
        "products",
        chart(title, title, curves, Axis("distance, tokens"), Axis("share of the product at 0"), {}),
        "It depends on the distance alone and falls with it; how fast is the base's doing.",
    )


def _one_pair() -> Picture:
    """The rotation of one fast and one slow pair, over eight positions."""
    parts = []
    for centre, pair, f in ((150, 0, 1.0), (430, 6, default_frequencies(CHANNELS, THETA)[6])):
        for p in range(8):
            x, y = centre + 90 * math.cos(p * f), 160 - 90 * math.sin(p * f)
            parts += [line(centre, 160, x, y, "curve s1"), text(x + 4, y, str(p))]
        parts.append(text(centre, 275, f"pair {pair}: {f:.3g} radians a token", "", "middle"))
    title = "The rotation of one pair, at positions 0 to 7"
    return Picture("rotation", picture_file(title, title, "".join(parts)), "Fast pairs are first, slow ones last.")


def _resized() -> list[Picture]:
    """Which trained row each new one reads: every way to resize, on a table whose rows hold their own numbers."""
    rows = torch.arange(64.0)[:, None]
    curves = []
    for name in RESIZE:
        if name != "hierarchical":  # mixes two rows
            made = RESIZE[name](rows, 256)
            curves.append(Curve(name, list(range(256)), made[:, 0].tolist()))
    title = "The trained row that each position reads, 64 rows resized to 256"
    return [
        Picture(
            "rows",
            chart(title, title, curves, Axis("position"), Axis("row of the trained table"), {}),
            "`cyclic` and `hierarchical`, which mixes two rows past the first 64, leave short texts as they were.",
        )
    ]


def _causal() -> list[Picture]:
    seen = [[1.0 if n <= m else 0.0 for n in range(SMALL)] for m in range(SMALL)]
    title = f"Which keys a query sees, in a text of {SMALL} tokens"
    return [Picture("keys", heat(title, title, seen, "key", "query"), "A decoder's causal mask is all that is left.")]


def _sinusoids() -> list[Picture]:
    effect = _scheme("sinusoidal", {}).effect_on(sample_geometry(FAMILIES["bert"]))
    return [*_tables(effect), _products(adds=True)]


EXTRA = {
    "rope": lambda: [_one_pair(), _products(adds=False)],
    "sinusoidal": _sinusoids,
    "learned": _resized,
    "none": _causal,
}
"""Pictures of single schemes."""
