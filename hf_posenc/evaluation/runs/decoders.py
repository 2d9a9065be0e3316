"""Runs of models that predict the next token: losses, retrieval, and the cost on short texts."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...errors import PosencError
from ...patching.lengths import reach, refuse_beyond_reach, trained_length
from ...patching.patch import unpatch_model
from ...patching.patch_state import is_patched
from ..measures.losses import refuse_not_causal, vocabulary_of
from ..measures.needles import MAKERS, trials
from ..measures.perplexity import (
    PROTOCOLS,
    Progress,
    Reading,
    cut_windows,
    loss_by_position,
    perplexity,
    rows_together,
)
from ..measures.processes import ALONE, Processes
from ..measures.retrieval import retrieval
from ..measures.rows import Row
from ..measures.shift import BEFORE, cut_passages, shift
from ..measures.texts import Document, bos_of, refuse_missing, refuse_strange_tokens
from .budget import estimate, refuse_oversized
from .entries import CHUNKED, Entry, parsed_schemes, patch_with
from .jobs import Job, keep, perform, progress_bar, scheme_of, unique_jobs
from .options import Options
from .results import Results, fingerprint, model_digest
from .tax import UNPATCHED, positions_undone, tax_lengths, tax_rows


@dataclass(frozen=True)
class Material:
    """The inputs of a run, the same for every model and scheme."""

    tokenizer: Any
    documents: Sequence[Document]
    options: Options
    trained: int
    """The trained length of the model."""
    shared: Processes = ALONE
    taxed: bool = False
    """Whether the short-context tax is measured, which reads at and below the trained length."""

    @property
    def longest(self) -> int:
        return max(*self.options.lengths, *self.tax_lengths, 0)

    @property
    def longest_pass(self) -> int:
        """The most tokens in one pass: the gap of shift has no tokens."""
        short = BEFORE + self.options.reading.scored + 1
        read = self.options.lengths if set(self.options.tasks) != {"shift"} else (short,)
        return max(*read, *self.tax_lengths, 0)

    @property
    def tax_lengths(self) -> list[int]:
        return tax_lengths(self.trained, self.options.reading.scored) if self.taxed else []

    def bos(self, protocol: str) -> int | None:
        wanted = True if PROTOCOLS[protocol].opens else self.options.bos
        return bos_of(self.tokenizer, wanted)

    def jobs(self) -> list[Job]:
        """All jobs of the run."""
        found = []
        for task in self.options.tasks:
            if task == "perplexity":
                found += [self.perplexity_job(self.options.protocol, n) for n in self.options.lengths]
            elif task == "loss_by_position":
                found.append(self.position_job(max(self.options.lengths)))
            elif task == "shift":
                found.append(self.shift_job())
            else:
                found += [self.retrieval_job(task, n) for n in self.options.lengths]
        return found

    def curve_jobs(self) -> list[Job]:
        """The jobs whose curves are shown before and after a patch."""
        return [job for job in self.jobs() if job.key.startswith(("loss_by_position", "shift"))]

    def tax_jobs(self) -> list[Job]:
        return [self.perplexity_job("last", n) for n in self.tax_lengths]

    def perplexity_job(self, protocol: str, length: int) -> Job:
        refuse_textless(self.documents, "perplexity")
        reading, bos = self.reading(protocol), self.bos(protocol)
        windows = cut_windows(protocol, self.documents, length, self.longest, reading, bos)

        def run(model: Any, scheme: str, progress: Progress) -> list[Row]:
            return perplexity(
                model, self.documents, length, protocol=protocol, longest=self.longest, reading=reading, bos=bos,
                scheme=scheme, progress=progress, shared=self.shared,
            )  # fmt: skip

        tokens = sum(w.end - w.start + (bos is not None) for w in windows)
        return Job(f"perplexity/{protocol}/{length}", length, tokens, run)

    def reading(self, protocol: str) -> Reading:
        """The settings without those of another protocol: the tax is always measured by `last`."""
        given = self.options.reading
        if protocol == self.options.protocol:
            return given
        return Reading(scored=given.scored, batch_size=given.batch_size, chunk=given.chunk, step=given.step)

    def position_job(self, length: int) -> Job:
        refuse_textless(self.documents, "loss_by_position")
        bos, given = self.bos("last"), self.reading("last")

        def run(model: Any, scheme: str, progress: Progress) -> list[Row]:
            return loss_by_position(
                model, self.documents, length, reading=given, bos=bos, scheme=scheme, progress=progress,
                shared=self.shared,
            )  # fmt: skip

        windows = cut_windows("last", self.documents, length, length, given, bos)
        return Job(f"loss_by_position/{length}", length, len(windows) * length, run)

    def shift_job(self) -> Job:
        """One job for all lengths, since each is compared with the shortest."""
        refuse_textless(self.documents, "shift")
        bos, given, lengths = self.bos("last"), self.reading("last"), self.options.lengths
        before, passages = cut_passages(self.documents, min(lengths), given, bos)

        def run(model: Any, scheme: str, progress: Progress) -> list[Row]:
            end = reach(model) or max(lengths)
            return shift(
                model, self.documents, [n for n in lengths if n <= end], reading=given, bos=bos, scheme=scheme,
                progress=progress, shared=self.shared,
            )  # fmt: skip

        tokens = (before.numel() + passages.numel()) * len(set(lengths))
        return Job(f"shift/{'-'.join(map(str, sorted(set(lengths))))}", min(lengths), tokens, run)

    def retrieval_job(self, task: str, length: int) -> Job:
        asked, given = self.options.asked, self.options.reading
        one = replace(asked, trials=1, depths=asked.depths[:1])
        trials(task, length, self.tokenizer, one, self.documents)  # raises now, not after hours, if no trial fits

        def run(model: Any, scheme: str, progress: Progress) -> list[Row]:
            return retrieval(
                model, self.tokenizer, task, length, asked=asked, documents=self.documents,
                batch_size=given.batch_size, scheme=scheme, progress=progress, shared=self.shared, step=given.step,
            )  # fmt: skip

        return Job(f"{task}/{length}", length, len(asked.depths) * asked.trials * length, run)


def refuse_textless(documents: Sequence[Document], task: str) -> None:
    if not documents:
        raise PosencError(f"{task} reads text, and none was given: name one or more files with --text.")


def prepare(model: Any, material: Material, force: bool) -> Material:
    """Check everything that could fail later, and return what can be measured."""
    refuse_missing(material.tokenizer)
    refuse_not_causal(model)
    refuse_strange_tokens(material.documents, vocabulary_of(model))
    material = drop_tax_without_text(material)
    reading, length = material.options.reading, material.longest_pass
    rows = reading.batch_size or rows_together(length, model.device.type)
    cached = reading.step is not None or any(task in MAKERS for task in material.options.tasks)
    refuse_oversized(model, estimate(model, rows, length, reading.chunk, cached, reading.step), force)
    return material


def drop_tax_without_text(material: Material) -> Material:
    """Leave the tax out, with a warning, if the text is too short only for it."""
    if material.taxed and material.trained > max(material.options.lengths):
        try:
            material.tax_jobs()
        except PosencError as error:
            warnings.warn(
                f"The short-context tax is not measured: it reads at the trained length, {material.trained}. {error}",
                stacklevel=4,
            )
            return replace(material, taxed=False)
    return material


def evaluate_decoder(
    model: Any,
    tokenizer: Any,
    documents: Sequence[Document],
    *,
    options: Options,
    reference: Any,
    out: Any,
    force: bool,
    quiet: bool,
    shared: Processes = ALONE,
) -> list[Row]:
    """Losses and retrieval at every length; for a patched model and with text, also its short-context tax."""
    model.eval()
    scheme = scheme_of(model)
    due = scheme != UNPATCHED and bool(documents)
    if reference is not None and not due:
        raise PosencError(
            "A reference is for the short-context tax, which is not measured here: "
            f"{'there is no text' if scheme != UNPATCHED else 'the model is not patched'}. Leave --reference out."
        )
    material = prepare(model, Material(tokenizer, documents, options, trained_length(model), shared, due), force)
    refuse_beyond_reach(model, max(options.lengths))
    taxed = material.tax_jobs()
    own = unique_jobs([*material.jobs(), *taxed])
    before = [*taxed, *(job for job in material.curve_jobs() if taxed)]
    results = Results(out, decoder_identity(model, tokenizer, documents, options, reference), shared)
    with progress_bar([*((scheme, job) for job in own), *((UNPATCHED, job) for job in before)], results, quiet) as bar:
        rows = perform(model, scheme, own, results, bar.update)
        if taxed:
            rows += unpatched_rows(model, reference, before, results, bar.update)
            rows += keep(results, f"{scheme}/tax", tax_rows(rows, material.trained))
    return rows


def decoder_identity(
    model: Any, tokenizer: Any, documents: Sequence[Document], options: Options, reference: Any = None
) -> dict[str, Any]:
    """What identifies an evaluation, for resuming it."""
    values = options.identity()
    if reference is not None:
        values["reference"] = model_digest(reference.eval())
    return fingerprint(model, tokenizer, documents, values)


def unpatched_rows(model: Any, reference: Any, jobs: Sequence[Job], results: Results, bar: Progress) -> list[Row]:
    """The rows of the unpatched model; if that is not available, none, with a warning."""
    if reference is not None:
        return perform(reference, UNPATCHED, within_reach(reference, UNPATCHED, jobs), results, bar)
    try:
        with positions_undone(model):
            return perform(model, UNPATCHED, within_reach(model, UNPATCHED, jobs), results, bar)
    except PosencError as error:
        warnings.warn(
            f"The short-context tax was not measured: {error} Name the unpatched model with --reference.",
            stacklevel=2,
        )
        return []


def compare_decoders(
    model: Any,
    tokenizer: Any,
    schemes: str | Sequence[Entry],
    documents: Sequence[Document],
    *,
    target_length: int,
    options: Options,
    out: Any,
    force: bool,
    quiet: bool,
    shared: Processes = ALONE,
) -> list[Row]:
    """The unpatched model and every scheme in turn, with their short-context taxes."""
    if hasattr(model, "peft_config") or is_patched(model):
        raise PosencError("compare starts from an unpatched model without adapters; this one is patched or adapted.")
    model.eval()
    entries = parsed_schemes(schemes) if isinstance(schemes, str) else list(schemes)
    refuse_chunked(entries)
    trained = trained_length(model)
    material = prepare(model, Material(tokenizer, documents, options, trained, shared, bool(documents)), force)
    for entry in entries:  # fail now, not after an hour of measuring the first one
        patch_with(model, entry, target_length)
        unpatch_model(model)
    jobs = unique_jobs([*material.jobs(), *material.tax_jobs()])
    identity = {**options.identity(), "schemes": [entry.label for entry in entries], "target_length": target_length}
    results = Results(out, fingerprint(model, tokenizer, documents, identity), shared)
    names = [UNPATCHED, *(entry.label for entry in entries)]
    with progress_bar([(name, job) for name in names for job in jobs], results, quiet) as bar:
        rows = perform(model, UNPATCHED, within_reach(model, UNPATCHED, jobs), results, bar.update)
        for entry in entries:
            patch_with(model, entry, target_length)
            try:
                rows += perform(model, entry.label, within_reach(model, entry.label, jobs), results, bar.update)
            finally:
                unpatch_model(model)
            taxes = tax_rows([r for r in rows if r.scheme in (UNPATCHED, entry.label)], trained)
            rows += keep(results, f"{entry.label}/tax", taxes)
    return rows


def refuse_chunked(entries: Sequence[Entry]) -> None:
    if any(entry.scheme == CHUNKED for entry in entries):
        raise PosencError(
            f"{CHUNKED!r} averages embeddings of pieces of a text, and these tasks are for decoders: take "
            "--tasks embed_passkey or embed_needle, or leave it out."
        )


def within_reach(model: Any, scheme: str, jobs: Sequence[Job]) -> list[Job]:
    """The jobs that the model's position table is long enough for; warns about the others."""
    end = reach(model)
    found = [job for job in jobs if end is None or job.length <= end]
    left = sorted({job.length for job in jobs} - {job.length for job in found})
    if left:
        warnings.warn(f"{scheme} has {end} positions and is not measured at {left}.", stacklevel=3)
    return found
