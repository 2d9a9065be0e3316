"""Search spaces: a factor for each pair, or the options of a scheme. Candidates are tuples of numbers."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ..core.effects import Geometry, Rotation
from ..core.ranges import Range
from ..errors import PosencError
from ..schemes import SCHEMES, Scheme
from ..schemes.frequencies import base_frequencies, longrope_attention_factor
from ..schemes.temperature import TemperatureKind

Genes = tuple[float, ...]
CHANGED = 0.3
"""The share of a candidate's numbers that a mutation changes, as in LongRoPE."""
OVER = 1.25
"""The largest factor, as a multiple of the target's, as in LongRoPE."""
STARTS = ("linear", "ntk", "yarn", "llama3")
"""The schemes whose factors a search starts with."""
ATTENTION = Range(0.8, 1.8)
OF_TEMPERATURE = "temperature."
"""Prefix of the options of a temperature."""
KEPT = -1.0
"""The gene of an option that keeps its default."""


class Space(Protocol):
    """A search space."""

    def starts(self) -> dict[str, Genes]:
        """The first candidates, by name."""
        ...

    def mutate(self, genes: Genes, rng: random.Random) -> Genes: ...

    def cross(self, first: Genes, second: Genes, rng: random.Random) -> Genes: ...

    def scheme(self, genes: Genes) -> Scheme:
        """The scheme of a candidate; raises if the scheme refuses it."""
        ...


@dataclass(frozen=True)
class FactorSpace:
    """An attention factor, and a factor for each pair: at least 1, and not below that of a faster pair."""

    geometry: Geometry
    target: int

    @property
    def base(self) -> Genes:
        return base_frequencies(self.geometry)[0]

    @property
    def factor(self) -> float:
        return self.target / self.geometry.trained_length

    @property
    def most(self) -> float:
        return OVER * self.factor

    def starts(self) -> dict[str, Genes]:
        """Published maps, and ramps that end at pairs near the critical one."""
        found = {f"{name}'s factors": self.genes_of(SCHEMES[name](target_length=self.target)) for name in STARTS}
        theory = critical_pair(self.base, self.geometry.trained_length)
        for pair in range(max(theory - 3, 1), min(theory + 2, len(self.base) - 1) + 1):
            attention = longrope_attention_factor(self.factor, self.geometry.trained_length)
            found[f"ramp to pair {pair}"] = (attention, *ramp(len(self.base), pair, self.factor))
        return found

    def genes_of(self, scheme: Scheme) -> Genes:
        """The factors of a scheme that rescales RoPE, clipped to this space."""
        rotation = scheme.effect_on(self.geometry).rotation
        assert isinstance(rotation, Rotation)
        base, scaling = base_frequencies(self.geometry)
        factors = [b / f if f else self.most for b, f in zip(base, rotation.inv_freq, strict=True)]
        return (rotation.attention_scaling / scaling, *self.monotone(factors))

    def monotone(self, factors: Sequence[float]) -> Genes:
        found: list[float] = []
        for factor in factors:
            found.append(max(min(max(factor, 1.0), self.most), found[-1] if found else 1.0))
        return tuple(found)

    def mutate(self, genes: Genes, rng: random.Random) -> Genes:
        """Mutate single factors, or all from one pair on, or the attention factor."""
        attention, factors = genes[0], list(genes[1:])
        way = rng.choice(("each", "from", "attention"))
        if way == "each":
            factors = [f * math.exp(rng.gauss(0, 0.15)) if rng.random() < CHANGED else f for f in factors]
        elif way == "from":
            first, by = rng.randrange(len(factors)), math.exp(rng.gauss(0, 0.25))
            factors = [f * by if i >= first else f for i, f in enumerate(factors)]
        else:
            attention = min(max(attention * math.exp(rng.gauss(0, 0.04)), ATTENTION.low), ATTENTION.high)
        return (round(attention, 4), *(round(f, 4) for f in self.monotone(factors)))

    def cross(self, first: Genes, second: Genes, rng: random.Random) -> Genes:
        attention, *factors = (rng.choice(pair) for pair in zip(first, second, strict=True))
        return (attention, *self.monotone(factors))

    def scheme(self, genes: Genes) -> Scheme:
        attention, *factors = genes
        listed = tuple(factors)
        options = {"short_factor": listed, "long_factor": listed, "attention_factor": attention}
        return SCHEMES["longrope"].from_options({"target_length": self.target, **options})


def critical_pair(frequencies: Sequence[float], trained: int) -> int:
    """The first pair that does not complete a turn within the trained length."""
    waves = [2 * math.pi / f if f else math.inf for f in frequencies]
    return next((i for i, wave in enumerate(waves) if wave > trained), len(waves) - 1)


def searched_critical_pair(factors: Sequence[float], factor: float) -> int:
    """The first pair that is slowed by about the whole factor, so that it sees no new angles."""
    return next((i for i, f in enumerate(factors) if f >= 0.95 * factor), len(factors))


def ramp(count: int, pair: int, factor: float) -> Genes:
    """Factors that rise geometrically up to a pair, as in NTK, and stay constant from there on."""
    return tuple(factor ** min(i / pair, 1.0) for i in range(count))


@dataclass(frozen=True)
class OptionSpace:
    """The options that a scheme declares ranges for, each as its share of the range."""

    start: Scheme
    ranges: Mapping[str, Range]
    geometry: Geometry

    def starts(self) -> dict[str, Genes]:
        """The scheme with its defaults, and the middle of every range."""
        return {self.start.name: self._default(), "the middle of all ranges": (0.5,) * len(self.ranges)}

    def _default(self) -> Genes:
        given = {n: v for n, v in self.start.options().items() if isinstance(v, (int, float))}
        kind = temperature_of(self.start)
        given |= {OF_TEMPERATURE + n: getattr(kind, n) for n in (kind.ranges() if kind else ())}
        return tuple(r.share(given[n]) if n in given else KEPT for n, r in self.ranges.items())

    def mutate(self, genes: Genes, rng: random.Random) -> Genes:
        chosen = [rng.random() < max(CHANGED, 1 / len(genes)) for _ in genes]
        if not any(chosen):
            chosen[rng.randrange(len(genes))] = True
        moved = [rng.random() if x == KEPT else x + rng.gauss(0, 0.15) for x in genes]
        return tuple(round(min(max(m, 0.0), 1.0), 4) if c else x for x, m, c in zip(genes, moved, chosen, strict=True))

    def cross(self, first: Genes, second: Genes, rng: random.Random) -> Genes:
        return tuple(rng.choice(pair) for pair in zip(first, second, strict=True))

    def scheme(self, genes: Genes) -> Scheme:
        """The scheme of a candidate. Options without a gene keep their values."""
        moved = {n: r.at(x) for (n, r), x in zip(self.ranges.items(), genes, strict=True) if x != KEPT}
        heat = {n.removeprefix(OF_TEMPERATURE): moved.pop(n) for n in list(moved) if n.startswith(OF_TEMPERATURE)}
        kind = temperature_of(self.start)
        tempered = {"temperature": replace(kind, **heat)} if kind and heat else {}
        return type(self.start).from_options({**self.start.options(), **moved, **tempered})


def temperature_of(scheme: Scheme) -> TemperatureKind | None:
    return scheme.temperature if isinstance(scheme.temperature, TemperatureKind) else None


def option_space(start: Scheme, geometry: Geometry) -> OptionSpace:
    kind = temperature_of(start)
    heat = {OF_TEMPERATURE + name: values for name, values in (kind.ranges() if kind else {}).items()}
    ranges = {**start.ranges(geometry), **heat}
    if not ranges:
        able = sorted(name for name, cls in SCHEMES.items() if cls.ranges is not Scheme.ranges)
        raise PosencError(
            f"{start.name!r} has no options that could be searched. These have: "
            f"{', '.join(['longrope', *able])}; and any with a temperature of drope, llama4 or ministral."
        )
    return OptionSpace(start, ranges, geometry)
