"""`recommend`: which scheme to take for a model, a length and a runtime; from rules alone, or from measuring."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..engines.kinds import keys_of, kind_of_rope
from ..engines.table import RUNTIMES, look_up
from ..errors import PosencError, suggestion
from ..evaluation.measures.perplexity import Reading
from ..evaluation.measures.rows import Row
from ..evaluation.measures.texts import Document, bos_of
from ..evaluation.runs.compare import compare
from ..evaluation.runs.entries import Entry
from ..evaluation.runs.options import Options
from ..evaluation.runs.standings import standings
from ..families import places
from ..patching.configs import places_to_patch
from ..patching.describe import describe
from ..patching.lengths import trained_length
from ..patching.measure import measure
from ..patching.patch_state import is_patched, unwrap_model
from ..patching.plan import plan
from ..patching.untrained import needs_training
from ..schemes import SCHEMES
from .rules import RULES, Rule
from .samples import sample_losses, text_samples

MOST = 4
"""Candidates that are measured."""
WINDOWS = 20


@dataclass(frozen=True)
class Option:
    """A scheme that would do."""

    rule: Rule
    needs_training: bool
    portability: str
    served: str
    """What the runtime that was asked for makes of it."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One sentence, what it rests on, and the command to go on with."""

    sentence: str
    options: list[Option]
    passed_over: dict[str, str]
    """Schemes that do not fit, and why."""
    command: str
    rows: list[Row] = field(default_factory=list, repr=False)

    def __str__(self) -> str:
        lines = [self.sentence, ""]
        for option in self.options:
            trained = "needs training" if option.needs_training else "works as it is"
            lines.append(f"{option.rule.label:<18}{trained}; {option.portability}; {option.rule.why}")
            lines.append(f"{'':<18}from: {option.rule.source}")
            if option.served:
                lines.append(f"{'':<18}served: {option.served}")
        lines += [f"{label:<18}left out: {why}" for label, why in self.passed_over.items()]
        return "\n".join([*lines, "", f"Next: {self.command}"])


def recommend(
    model: Any,
    tokenizer: Any = None,
    documents: Sequence[Document] = (),
    *,
    target_length: int,
    serve: str | None = None,
    training: bool = True,
    path: str = "MODEL",
    out: Any = None,
    tell: Callable[[str], object] = lambda _: None,
) -> Advice:
    """Which scheme to take. With `documents` the candidates that fit are measured; the model ends as it came.

    `serve` names the runtime that must compute it right, `training=False` rules out what needs training. A winner is
    named only where error bars carry it. `tell` is told beforehand what measuring will take.
    """
    inner = unwrap_model(model)
    if is_patched(inner):
        raise PosencError("A recommendation starts from the model's own positions: call unpatch_model first.")
    if serve is not None and serve not in RUNTIMES:
        raise PosencError(f"Unknown runtime {serve!r}.{suggestion(serve, list(RUNTIMES))}")
    trained = trained_length(model)
    if target_length <= trained:
        raise PosencError(
            f"A target of {target_length} tokens is no longer than the trained length, {trained}: the model reads it "
            "as it is."
        )
    fitting, passed_over = _fitting_options(inner, target_length, trained, serve, training)
    if not fitting:
        reasons = "; ".join(f"{label}: {why}" for label, why in passed_over.items()) or "no rule fits"
        raise PosencError(f"Nothing fits a target of {target_length} tokens on this model ({reasons}).")
    rows = _measure(model, tokenizer, documents, fitting, target_length, out, tell) if documents else []
    best, sentence = _verdict(fitting, rows, target_length, trained)
    return Advice(
        sentence=sentence, options=fitting, passed_over=passed_over, command=_command(best, path, target_length, rows),
        rows=rows,
    )  # fmt: skip


def _fitting_options(
    model: Any, target: int, trained: int, serve: str | None, training: bool
) -> tuple[list[Option], dict[str, str]]:
    """The rules that fit, each tried on the model itself, and the reasons against others."""
    where = places(model)
    own = where.family.positions.split(" or ")[0]
    found: list[Option] = []
    passed_over: dict[str, str] = {}
    for rule in RULES:
        if rule.label in {option.rule.label for option in found} or not rule.fits(own, target / trained, True):
            continue
        untrained = needs_training_for(rule, where)
        if not training and (rule.trains or untrained):
            passed_over[rule.label] = "it needs training"
            continue
        try:
            option = _try_rule(model, rule, target, serve, untrained)
        except PosencError as error:
            passed_over[rule.label] = str(error)
            continue
        if serve is not None and not option.served.startswith("right"):
            passed_over[rule.label] = f"{RUNTIMES[serve]}: {option.served or 'untried'}"
            continue
        found.append(option)
    return sorted(found, key=lambda option: option.rule.trains), passed_over


def needs_training_for(rule: Rule, where: Any) -> bool:
    return needs_training(SCHEMES[rule.scheme], where.family)


def _try_rule(model: Any, rule: Rule, target: int, serve: str | None, untrained: bool) -> Option:
    """The option that a rule gives: its grade, and whether the runtime could serve it."""
    where, scheme = (
        places_to_patch(model),
        SCHEMES[rule.scheme].from_options({"target_length": target, **rule.options}),
    )
    journal = plan(where, scheme, measure(where, scheme, "extend", None))
    journal.apply()
    try:
        said = describe(model)
        config = model.config.to_dict()
        sealed = said.portability.startswith("sealed")
        kind = "sealed" if sealed else kind_of_rope(config.get("rope_parameters") or {})
        served = "" if serve is None else _runtime_verdict(serve, model.config.model_type, kind, keys_of(config))
        return Option(rule, untrained or rule.trains, said.portability.partition(":")[0], served)
    finally:
        journal.undo()
        journal.forget()


def _runtime_verdict(runtime: str, architecture: str, kind: str, keys: set[str]) -> str:
    """The verdict of a runtime: the better one of checkpoint and export."""
    found = [look_up(runtime, way, architecture, kind, keys) for way in ("checkpoint", "export")]
    said = [f"{entry}{', by `hf-posenc export`' if entry.way == 'export' else ''}" for entry in found if entry]
    right = [each for each in said if each.startswith("right")]
    return (right or said or ["untried"])[0]


def _measure(
    model: Any,
    tokenizer: Any,
    documents: Sequence[Document],
    options: list[Option],
    target: int,
    out: Any,
    tell: Callable[[str], object],
) -> list[Row]:
    able = [option.rule for option in options if not option.needs_training][:MOST]
    entries = [Entry(rule.label, rule.scheme, dict(rule.options)) for rule in able]
    if not entries:
        return []
    named, windows = ", ".join(entry.label for entry in entries), f"{WINDOWS} windows of {target} tokens each"
    seconds = (len(entries) + 1) * WINDOWS * _seconds_of_a_window(model, tokenizer, documents, target)
    tell(f"Measuring {named} and the model as it is, {windows}: about {seconds:.0f} s.")
    return compare(
        model,
        tokenizer,
        entries,
        documents,
        target_length=target,
        options=Options(lengths=(target,), tasks=("perplexity",), reading=Reading(windows=WINDOWS)),
        out=out,
    )


def _seconds_of_a_window(model: Any, tokenizer: Any, documents: Sequence[Document], target: int) -> float:
    """Seconds for one window, measured on the second pass."""
    long = [document for document in documents if len(document.ids) >= target]
    samples = text_samples(long[:1], target, 1, bos_of(tokenizer, None))
    if not samples:  # the measurement will refuse it, with what is needed
        return 0.0
    sample_losses(model, samples)
    begun = time.monotonic()
    sample_losses(model, samples)
    return time.monotonic() - begun


def _verdict(options: list[Option], rows: list[Row], target: int, trained: int) -> tuple[Rule, str]:
    """The recommended rule, and a sentence that says how strong the evidence is."""
    how_far = f"{target} tokens ({target / trained:.3g} times the trained {trained})"
    at = [s for s in standings(rows) if s.length == target and s.scheme != "unpatched"]
    if not at:
        rule = options[0].rule
        after = ", then train it" if options[0].needs_training else ""
        return rule, f"For {how_far}: {rule.label}{after}. By rule, not measured: --text measures."
    first = at[0]
    rule = next(o.rule for o in options if o.rule.label == first.scheme)
    level = [name for name in first.tied if name != "unpatched"]
    plus = "" if first.stderr is None else f" ± {first.stderr:.3f}"
    if "unpatched" in first.tied:
        return rule, f"For {how_far} nothing is better than the model as it is, as far as error bars tell."
    if level:
        named = ", ".join([first.scheme, *level])
        return rule, f"For {how_far} {named} are level (loss {first.value:.3f}{plus}): error bars carry no winner."
    return rule, f"For {how_far} take {first.scheme}: loss {first.value:.3f}{plus}, better than all others measured."


def _command(rule: Rule, path: str, target: int, rows: list[Row]) -> str:
    if rule.trains:
        return f"hf-posenc recipes (then: hf-posenc train RECIPE --model.path={path} --scheme.target_length={target})"
    options = "".join(f" --option {key}={value}" for key, value in rule.options.items())
    return f"hf-posenc patch {path} {path.rstrip('/')}-long --scheme {rule.scheme} --target-length {target}{options}"
