"""`search`: find the factors or options with the lowest loss at a target length."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ..errors import PosencError, UntrainedWarning, suggestion
from ..evaluation.measures.estimates import differ, mean_and_error
from ..evaluation.measures.losses import refuse_not_causal, vocabulary_of
from ..evaluation.measures.processes import Processes, launched_processes
from ..evaluation.measures.rows import Row
from ..evaluation.measures.texts import Document, bos_of, refuse_strange_tokens
from ..evaluation.runs.results import Results, fingerprint
from ..schemes import SCHEMES, Scheme
from .budget import Budget
from .candidates import LiveRope, geometry_of, scheme_in
from .evolution import Round, evolve, mean
from .samples import FITNESSES, UNSEEN, Sample, needle_samples, sample_losses, split, text_samples
from .spaces import FactorSpace, Genes, Space, option_space

FACTORS = "longrope"
"""The scheme that takes a factor for each pair."""
UNPATCHED = "unpatched"
READ = "perplexity"
"""The task of rows with the loss of text."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The result of a search."""

    scheme: Scheme
    """The scheme to patch with: the best candidate, or the start if nothing better was found."""
    genes: Genes
    start: str
    """The best of the starts."""
    improved: bool
    """Whether the result is significantly better than the start on text that the search never saw."""
    known: dict[str, Genes] = field(repr=False)
    """The published maps that a search over factors started with; {} for a search over options."""
    rounds: list[Round] = field(repr=False)
    rows: list[Row] = field(repr=False)
    """The loss of each map on that text, at the target and the trained length. If needles guided the search, also the
    loss of the answers of other needles."""
    sentence: str

    def value(self, scheme: str, length: int, task: str = READ) -> Row:
        return next(row for row in self.rows if (row.scheme, row.length, row.task) == (scheme, length, task))


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Everything that a search needs."""

    model: Any
    tokenizer: Any
    documents: Sequence[Document]
    target: int
    fitness: str
    short_weight: float
    budget: Budget
    seed: int
    start: Scheme
    trained: int
    space: Space
    trying: Callable[[Genes], AbstractContextManager[None]]
    """The model with a candidate, within a `with` block."""

    def options(self) -> dict[str, Any]:
        """What identifies a search, for resuming it."""
        return {
            "search": self.start.name,
            "start": self.start.options(),
            "target": self.target,
            "fitness": self.fitness,
            "short_weight": self.short_weight,
            "seed": self.seed,
            **vars(self.budget),
        }


def search(
    model: Any,
    tokenizer: Any,
    documents: Sequence[Document],
    *,
    target_length: int,
    scheme: str | Scheme = FACTORS,
    fitness: str = "loss",
    short_weight: float = 0.0,
    budget: Budget | None = None,
    seed: int = 0,
    out: Any = None,
    tell: Callable[[Round], object] = lambda _: None,
) -> Found:
    """Search for the lowest loss at `target_length`. The model is unpatched afterwards.

    `longrope` searches a factor for each pair, any other scheme the options that it and its temperature declare ranges
    for. `fitness` is the loss at the end of windows (`loss`) or of the answers of needles (`needles`), plus
    `short_weight` times the loss at the trained length. Texts are split into a part that guides the search and a
    part that judges it. With `out`, a JSONL file, an interrupted search resumes.
    """
    setup = _setup(model, tokenizer, documents, target_length, scheme, fitness, short_weight, budget or Budget(), seed)
    guiding, judging = split(documents, target_length)
    bos = bos_of(tokenizer, None)
    shared = launched_processes()
    identity = fingerprint(model, tokenizer, documents, setup.options())
    log = Results(out if shared.first else None, identity)
    log.done = shared.from_first(log.done)
    judge = partial(_judge, setup, _samples(setup, guiding, bos), log, shared)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UntrainedWarning)
        rounds = evolve(setup.space, judge, setup.budget, seed, tell)
        starts = setup.space.starts()
        known = dict(zip(starts, judge(list(starts.values()), setup.budget.samples), strict=True))
        start = min(starts, key=lambda name: mean(known[name]))
        return _conclude(setup, rounds, start, starts, judging, bos)


def _setup(
    model: Any,
    tokenizer: Any,
    documents: Sequence[Document],
    target: int,
    scheme: str | Scheme,
    fitness: str,
    short_weight: float,
    budget: Budget,
    seed: int,
) -> Setup:
    """Check the arguments before anything slow starts."""
    if fitness not in FITNESSES:
        raise PosencError(f"Unknown fitness {fitness!r}.{suggestion(fitness, list(FITNESSES))}")
    if not math.isfinite(short_weight) or short_weight < 0:
        raise PosencError(f"short_weight must be a number from 0 up, got {short_weight!r}.")
    refuse_not_causal(model)
    refuse_strange_tokens(documents, vocabulary_of(model))
    start = SCHEMES[scheme](target_length=target) if isinstance(scheme, str) else scheme
    if start.target_length is None and start.factor is None:
        start = replace(start, target_length=target)
    if start.name == FACTORS and start.temperature is not None:
        raise PosencError(
            "A search over factors includes an attention factor: leave temperature out, or search the options of "
            "another scheme with it."
        )
    geometry = geometry_of(model, start)
    if target <= geometry.trained_length:
        raise PosencError(
            f"A target of {target} tokens is not longer than the trained length, {geometry.trained_length}: there is "
            "nothing to extend. Give a longer target_length."
        )
    space: Space = FactorSpace(geometry, target) if start.name == FACTORS else option_space(start, geometry)
    live = LiveRope(model) if start.name == FACTORS else None

    def trying(genes: Genes) -> AbstractContextManager[None]:
        return scheme_in(model, space.scheme(genes)) if live is None else live.holding(genes[1:], genes[0])

    return Setup(
        model=model, tokenizer=tokenizer, documents=documents, target=target, fitness=fitness,
        short_weight=short_weight, budget=budget, seed=seed, start=start,
        trained=geometry.trained_length, space=space, trying=trying,
    )  # fmt: skip


def _samples(setup: Setup, guiding: Sequence[Document], bos: int | None) -> list[tuple[Sample, Sample | None]]:
    """Pairs of samples at the target and, if it has a weight, at the trained length."""
    count = setup.budget.samples
    if setup.fitness == "needles":
        far = needle_samples(setup.tokenizer, setup.target, count, setup.seed)
    else:
        far = text_samples(guiding, setup.target, count, bos)
    if len(far) < count:
        raise PosencError(
            f"The text has room for {len(far)} windows of {setup.target} tokens to guide the search, and {count} are "
            f"asked for: give a longer text, or ask for {len(far)} samples."
        )
    near: list[Any] = [None] * count
    if setup.short_weight:
        near = list(text_samples(guiding, setup.trained, count, bos))
    return list(zip(far, near, strict=True))


def _judge(
    setup: Setup,
    samples: Sequence[tuple[Sample, Sample | None]],
    log: Results,
    shared: Processes,
    candidates: Sequence[Genes],
    count: int,
) -> list[list[float]]:
    """The losses of candidates on the first samples. Missing ones are split between processes."""
    found = [_kept_losses(log, genes) for genes in candidates]
    missing = [i for i, losses in enumerate(found) if len(losses) < count]

    def read(index: int) -> list[float]:
        return _losses(setup, candidates[index], samples[len(found[index]) : count])

    for index, losses in zip(missing, shared.each(missing, read), strict=True):
        found[index] = [*found[index], *losses]
        _keep(log, candidates[index], found[index], setup)
    return [losses[:count] for losses in found]


def _losses(setup: Setup, genes: Genes, samples: Sequence[tuple[Sample, Sample | None]]) -> list[float]:
    """The losses of a candidate; infinite if the scheme refuses it or they are not finite."""
    far, near = [s for s, _ in samples], [s for _, s in samples if s is not None]
    try:
        with setup.trying(genes):
            losses = sample_losses(setup.model, far)
            short = sample_losses(setup.model, near) if near else [0.0] * len(far)
    except PosencError:
        return [math.inf] * len(far)
    return [a + setup.short_weight * b for a, b in zip(losses, short, strict=True)]


def _key(genes: Genes) -> str:
    return hashlib.sha256(repr(genes).encode()).hexdigest()[:16]


def _kept_losses(log: Results, genes: Genes) -> list[float]:
    rows = log.done.get(_key(genes), [])
    return list(rows[0].details["losses"]) if rows else []


def _keep(log: Results, genes: Genes, losses: list[float], setup: Setup) -> None:
    details = {"losses": losses, "genes": list(genes)}
    row = Row(
        task="search", protocol=setup.fitness, scheme=setup.start.name, length=setup.target, metric="loss",
        value=mean(losses), stderr=None, n=len(losses), details=details,
    )  # fmt: skip
    log.add(_key(genes), [row])


def _conclude(
    setup: Setup,
    rounds: list[Round],
    start: str,
    starts: dict[str, Genes],
    judging: Sequence[Document],
    bos: int | None,
) -> Found:
    """Compare the best candidate with the starts, on text that the search never saw."""
    named: dict[str, Genes | None] = {UNPATCHED: None, **starts, "searched": rounds[-1].genes}
    plain = replace(setup, short_weight=0.0)
    rows = []
    for task, length, samples in _judging_samples(setup, judging, bos):
        for name, genes in named.items():
            pairs = [(sample, None) for sample in samples]
            losses = sample_losses(setup.model, samples) if genes is None else _losses(plain, genes, pairs)
            rows.append(_row(task, name, length, losses))
    decides = rows[-len(named) :]  # text at the target, or needles
    before, after = (next(row for row in decides if row.scheme == name) for name in (start, "searched"))
    apart = differ(before.details["losses"], after.details["losses"])
    better = after.value < before.value
    chosen = rounds[-1].genes if better else starts[start]
    return Found(
        scheme=setup.space.scheme(chosen),
        genes=chosen,
        start=start,
        known={name: starts[name] for name in starts if setup.start.name == FACTORS and name.endswith("factors")},
        improved=better and apart,
        rounds=rounds,
        rows=rows,
        sentence=_sentence(setup, start, before, after, better, apart),
    )


def _judging_samples(
    setup: Setup, judging: Sequence[Document], bos: int | None
) -> list[tuple[str, int, Sequence[Sample]]]:
    """The samples that judge: text at the trained length and the target, and other needles if needles guided. The last
    of them decides."""
    count = setup.budget.held_out
    found: list[tuple[str, int, Sequence[Sample]]] = [
        (READ, length, text_samples(judging, length, count, bos)) for length in (setup.trained, setup.target)
    ]
    if setup.fitness == "needles":
        fresh = needle_samples(setup.tokenizer, setup.target, count, UNSEEN + setup.seed)
        found.append(("needles", setup.target, fresh))
    return found


def _row(task: str, name: str, length: int, losses: list[float]) -> Row:
    value, error = mean_and_error(losses) if all(map(math.isfinite, losses)) else (math.inf, None)
    return Row(
        task=task, protocol="last", scheme=name, length=length, metric="loss", value=value, stderr=error,
        n=len(losses), details={"losses": losses},
    )  # fmt: skip


def _sentence(setup: Setup, start: str, before: Row, after: Row, better: bool, apart: bool) -> str:
    what = "held-out text" if after.task == READ else "needles that it never saw"
    where = f"At {setup.target} tokens of {what}"
    if not better:
        return f"{where} nothing better than {start} was found (loss {before.value:.4f}): that is what is returned."
    gain, error = mean_and_error(
        [b - a for b, a in zip(before.details["losses"], after.details["losses"], strict=True)]
    )
    level = "" if apart else ", which error bars do not carry"
    bars = "" if error is None else f" ± {error:.4f}"
    return f"{where} the search is {gain:.4f}{bars} nats better than {start}{level} (n = {after.n})."
