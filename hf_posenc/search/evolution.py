"""Evolutionary search. Candidates that are clearly worse on a few samples are not measured on more."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .budget import Budget
from .spaces import Genes, Space

Judge = Callable[[Sequence[Genes], int], list[list[float]]]
"""The losses of each candidate on the first so many samples; infinite if it cannot be measured."""


@dataclass(frozen=True)
class Round:
    """The state of the search after a round."""

    tried: int
    """Number of candidates so far."""
    read: int
    """Number of samples measured so far."""
    best: float
    genes: Genes


def evolve(
    space: Space, judge: Judge, budget: Budget, seed: int, tell: Callable[[Round], object] = lambda _: None
) -> list[Round]:
    """Run a search; the last round has the best candidate. Round 0 are the starts, measured on every sample."""
    rng = random.Random(seed)
    known: dict[Genes, list[float]] = {}
    starts = list(dict.fromkeys(space.starts().values()))
    known.update(zip(starts, judge(starts, budget.samples), strict=True))
    tried, read = len(starts), len(starts) * budget.samples
    rounds = [_make_round(known, tried, read)]
    tell(rounds[0])
    seen = set(starts)
    for _ in range(budget.rounds):
        children = _children(space, _best(known, budget.parents), budget.population, seen, rng)
        if not children:
            break  # there are no other candidates
        seen.update(children)
        tried += len(children)
        survivors, done = children, 0
        for rung in budget.rungs:
            losses = judge(survivors, rung)
            read += len(survivors) * (rung - done)
            done = rung
            found = dict(zip(survivors, losses, strict=True))
            if rung < budget.samples:
                survivors = _promising(found, known, rung, budget.parents)
        known.update(found)
        rounds.append(_make_round(known, tried, read))
        tell(rounds[-1])
    return rounds


def mean(losses: Sequence[float]) -> float:
    """The mean; infinite if a loss is not finite."""
    total = math.fsum(losses) / len(losses) if all(map(math.isfinite, losses)) else math.inf
    return total


def _make_round(known: dict[Genes, list[float]], tried: int, read: int) -> Round:
    best = _best(known, 1)[0]
    return Round(tried, read, mean(known[best]), best)


def _best(known: dict[Genes, list[float]], count: int) -> list[Genes]:
    return sorted(known, key=lambda genes: (mean(known[genes]), genes))[:count]


def _promising(
    found: dict[Genes, list[float]], known: dict[Genes, list[float]], rung: int, parents: int
) -> list[Genes]:
    """The better half, without those that are far worse than the worst parent on the same samples."""
    ranked = sorted(found, key=lambda genes: (mean(found[genes]), genes))
    half = ranked[: max(1, (len(ranked) + 1) // 2)]
    worst = mean(known[_best(known, parents)[-1]][:rung])
    if not math.isfinite(worst):
        return half
    near = [genes for genes in half if mean(found[genes]) <= 1.25 * worst]
    return near or half[:1]


def _children(space: Space, parents: list[Genes], count: int, seen: set[Genes], rng: random.Random) -> list[Genes]:
    """New candidates: half are a changed parent, half a mix of two. None was tried before."""
    found: list[Genes] = []
    for attempt in range(20 * count):
        if len(found) == count:
            break
        if attempt % 2 and len(parents) > 1:
            first, second = rng.sample(parents, 2)
            child = space.mutate(space.cross(first, second, rng), rng)
        else:
            child = space.mutate(rng.choice(parents), rng)
        if child not in seen and child not in found:
            found.append(child)
    return found
