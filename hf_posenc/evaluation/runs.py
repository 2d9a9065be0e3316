"""A run: the measurements of one model, job by job, each kept as soon as it is made."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import nn
from tqdm import tqdm  # type: ignore[import-untyped]

from ..describe import bare, describe, live_table
from ..measure import own_length
from ..patch import is_patched
from ..registry import PosencError, suggestion
from .budget import estimate, refuse_oversized
from .haystacks import HAYSTACKS, Haystacks
from .losses import found_places, refuse_not_causal, vocabulary_of
from .needles import MAKERS, Retrieval, trials
from .perplexity import PROTOCOLS, Progress, Reading, cut, loss_by_position, perplexity, protocol_of, rows_together
from .results import Results, fingerprint, model_digest
from .retrieval import retrieval
from .rows import Row
from .tax import UNPATCHED, positions_undone, tax_lengths, tax_rows
from .texts import Document, bos_of, refuse_missing, refuse_strange_tokens

READING_TASKS = ("perplexity", "loss_by_position", *MAKERS)
"""For models that predict the next token."""
TASKS = (*READING_TASKS, *HAYSTACKS)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is measured, and how."""

    lengths: tuple[int, ...]
    tasks: tuple[str, ...] = ("perplexity",)
    protocol: str = "last"
    reading: Reading = field(default_factory=Reading)
    asked: Retrieval = field(default_factory=Retrieval)
    haystacks: Haystacks = field(default_factory=Haystacks)
    bos: bool | None = None
    """Whether windows open with BOS; as the tokenizer does, unless given."""

    def __post_init__(self) -> None:
        if not self.lengths or not self.tasks:
            raise PosencError("At least one length and one task are needed.")
        for task in self.tasks:
            if task not in TASKS:
                raise PosencError(f"Unknown task {task!r}.{suggestion(task, list(TASKS))}")
        if self.embeds and not set(self.tasks) <= set(HAYSTACKS):
            raise PosencError(
                f"{', '.join(HAYSTACKS)} search by embeddings, and {', '.join(READING_TASKS)} ask what comes next: no "
                "model is made for both. Run them one after the other."
            )
        if protocol_of(self.protocol, self.reading).opens and self.bos is False:
            raise PosencError(f"The protocol {self.protocol!r} opens each window with BOS: leave --no-bos out.")

    @property
    def embeds(self) -> bool:
        """Whether embeddings are measured, not predictions."""
        return any(task in HAYSTACKS for task in self.tasks)

    def identity(self) -> dict[str, Any]:
        """What figures depend on: not how many tokens go through at once."""
        values = asdict(self)
        for name in ("batch_size", "chunk", "step"):
            values["reading"].pop(name)
        return values


@dataclass(frozen=True)
class Job:
    """One measurement, of about so many tokens."""

    key: str
    length: int
    tokens: int
    run: Callable[[Any, str, Progress], list[Row]]


@dataclass(frozen=True)
class Material:
    """What is read: the same for every model and scheme."""

    tokenizer: Any
    documents: Sequence[Document]
    options: Options
    trained: int
    """The length that the model was trained at."""
    taxed: bool = False
    """Whether the short-context tax will be measured, which reads at and below the trained length."""

    @property
    def longest(self) -> int:
        return max(*self.options.lengths, *self.tax_lengths, 0)

    @property
    def tax_lengths(self) -> list[int]:
        return tax_lengths(self.trained, self.options.reading.scored) if self.taxed else []

    def bos(self, protocol: str) -> int | None:
        wanted = True if PROTOCOLS[protocol].opens else self.options.bos
        return bos_of(self.tokenizer, wanted)

    def jobs(self) -> list[Job]:
        """Everything that was asked for."""
        found = []
        for task in self.options.tasks:
            if task == "perplexity":
                found += [self.perplexity_job(self.options.protocol, n) for n in self.options.lengths]
            elif task == "loss_by_position":
                found.append(self.position_job(max(self.options.lengths)))
            else:
                found += [self.retrieval_job(task, n) for n in self.options.lengths]
        return found

    def tax_jobs(self) -> list[Job]:
        return [self.perplexity_job("last", n) for n in self.tax_lengths]

    def perplexity_job(self, protocol: str, length: int) -> Job:
        refuse_textless(self.documents, "perplexity")
        reading, bos = self.reading(protocol), self.bos(protocol)
        windows = cut(protocol, self.documents, length, self.longest, reading, bos)

        def run(model: Any, scheme: str, progress: Progress) -> list[Row]:
            return perplexity(
                model, self.documents, length, protocol=protocol, longest=self.longest, reading=reading, bos=bos,
                scheme=scheme, progress=progress,
            )  # fmt: skip

        tokens = sum(w.end - w.start + (bos is not None) for w in windows)
        return Job(f"perplexity/{protocol}/{length}", length, tokens, run)

    def reading(self, protocol: str) -> Reading:
        """The settings, but for those that are another protocol's: the tax is always measured by `last`."""
        given = self.options.reading
        if protocol == self.options.protocol:
            return given
        return Reading(scored=given.scored, batch_size=given.batch_size, chunk=given.chunk, step=given.step)

    def position_job(self, length: int) -> Job:
        refuse_textless(self.documents, "loss_by_position")
        bos, given = self.bos("last"), self.reading("last")

        def run(model: Any, scheme: str, progress: Progress) -> list[Row]:
            return loss_by_position(
                model, self.documents, length, reading=given, bos=bos, scheme=scheme, progress=progress
            )

        windows = cut("last", self.documents, length, length, given, bos)
        return Job(f"loss_by_position/{length}", length, len(windows) * length, run)

    def retrieval_job(self, task: str, length: int) -> Job:
        asked, size = self.options.asked, self.options.reading.batch_size
        one = replace(asked, trials=1, depths=asked.depths[:1])
        trials(task, length, self.tokenizer, one, self.documents)  # raises now, not hours later, where none fits

        def run(model: Any, scheme: str, progress: Progress) -> list[Row]:
            return retrieval(
                model, self.tokenizer, task, length, asked=asked, documents=self.documents, batch_size=size,
                scheme=scheme, progress=progress,
            )  # fmt: skip

        return Job(f"{task}/{length}", length, len(asked.depths) * asked.trials * length, run)


def refuse_textless(documents: Sequence[Document], task: str) -> None:
    if not documents:
        raise PosencError(f"{task} reads text, and none was given: name one or more files with --text.")


def scheme_of(model: Any) -> str:
    return describe(model).scheme if is_patched(bare(model)) else UNPATCHED


def trained_length(model: Any) -> int:
    inner = bare(model)
    where = found_places(inner)
    if is_patched(inner) or where is None:
        known = getattr(describe(model), "trained_length", None)  # which a model of images has not
        length = known if where else getattr(inner.config, "max_position_embeddings", None)
    else:
        length = own_length(where)
    if not isinstance(length, int):
        raise PosencError(f"The config of {type(inner).__name__} does not say at which length the model was trained.")
    return length


def reach(model: Any) -> int | None:
    """Where the positions of a model end; None if they do not, or that is not known."""
    where = found_places(bare(model))
    for stack in where.stacks if where else []:
        table: Any = live_table(stack)
        if isinstance(table, nn.Embedding):
            return table.num_embeddings - stack.family.offset(stack.config)
    return None


def refuse_beyond_reach(model: Any, length: int) -> None:
    end = reach(model)
    if end is not None and length > end:
        raise PosencError(
            f"{type(bare(model)).__name__} has a table of {end} positions and cannot read {length} tokens. Take "
            f"lengths up to {end}, or patch it with a scheme that reaches further."
        )


def prepared(model: Any, material: Material, force: bool) -> Material:
    """What can be read; raises for whatever would go wrong later."""
    refuse_missing(material.tokenizer)
    refuse_not_causal(model)
    refuse_strange_tokens(material.documents, vocabulary_of(model))
    material = affordable(material)
    reading, length = material.options.reading, material.longest
    rows = reading.batch_size or rows_together(length, model.device.type)
    cached = reading.step is not None or any(task in MAKERS for task in material.options.tasks)
    refuse_oversized(model, estimate(model, rows, length, reading.chunk, cached), force)
    return material


def affordable(material: Material) -> Material:
    """Without the tax, where only the tax would need more text than there is."""
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


def perform(model: Any, scheme: str, jobs: Sequence[Job], results: Results, bar: Progress) -> list[Row]:
    """The rows of every job: those that are there already, and those made now."""
    rows = []
    for job in jobs:
        key = f"{scheme}/{job.key}"
        if key not in results.done:
            results.add(key, job.run(model, scheme, bar))
        rows += results.done[key]
    return rows


@contextmanager
def progress_bar(jobs: Sequence[tuple[str, Job]], results: Results, quiet: bool) -> Iterator[Any]:
    """A bar over all tokens that are still to be read."""
    left = sum(job.tokens for scheme, job in jobs if f"{scheme}/{job.key}" not in results.done)
    with tqdm(total=left, unit="tok", unit_scale=True, disable=quiet or not left, smoothing=0.1) as bar:
        yield bar


def unique(jobs: Sequence[Job]) -> list[Job]:
    return list({job.key: job for job in jobs}.values())


def evaluate(
    model: Any,
    tokenizer: Any,
    documents: Sequence[Document] = (),
    *,
    options: Options,
    reference: Any = None,
    out: Any = None,
    force: bool = False,
    quiet: bool = True,
) -> list[Row]:
    """Every figure that `options` asks for, and for a patched model its short-context tax.

    `reference` is what the tax is measured against; unless given, the same weights with the patch undone. `out` is a
    JSONL file that rows are appended to, and from which an interrupted run goes on. Embedding tasks take encoders and
    SentenceTransformers, and compare embeddings of short texts instead of losses.
    """
    if options.embeds:
        from .encoders import evaluate_encoder  # which is made of parts of this

        return evaluate_encoder(
            model, tokenizer, documents, options=options, reference=reference, out=out, force=force, quiet=quiet
        )
    model.eval()
    scheme = scheme_of(model)
    due = scheme != UNPATCHED and bool(documents)
    if reference is not None and not due:
        raise PosencError(
            "A reference is what the short-context tax is measured against, and none is due: "
            f"{'there is no text' if scheme != UNPATCHED else 'the model is not patched'}. Leave --reference out."
        )
    material = prepared(model, Material(tokenizer, documents, options, trained_length(model), due), force)
    refuse_beyond_reach(model, max(options.lengths))
    taxed = material.tax_jobs()
    own = unique([*material.jobs(), *taxed])
    results = Results(out, identity(model, tokenizer, documents, options, reference))
    with progress_bar([*((scheme, job) for job in own), *((UNPATCHED, job) for job in taxed)], results, quiet) as bar:
        rows = perform(model, scheme, own, results, bar.update)
        if taxed:
            rows += unpatched_rows(model, reference, taxed, results, bar.update)
            rows += kept(results, f"{scheme}/tax", tax_rows(rows, material.trained))
    return rows


def identity(
    model: Any, tokenizer: Any, documents: Sequence[Document], options: Options, reference: Any = None
) -> dict[str, Any]:
    """What makes an evaluation the same one."""
    if options.embeds:
        from .encoders import encoder_identity

        return encoder_identity(model, tokenizer, documents, options, reference)
    values = options.identity()
    if reference is not None:
        values["reference"] = model_digest(reference.eval())
    return fingerprint(model, tokenizer, documents, values)


def unpatched_rows(model: Any, reference: Any, jobs: Sequence[Job], results: Results, bar: Progress) -> list[Row]:
    """What the tax is measured against; where that cannot be had, nothing, and a warning that says why."""
    if reference is not None:
        return perform(reference, UNPATCHED, jobs, results, bar)
    try:
        with positions_undone(model):
            return perform(model, UNPATCHED, jobs, results, bar)
    except PosencError as error:
        warnings.warn(
            f"The short-context tax was not measured: {error} Name the unpatched model with --reference.",
            stacklevel=2,
        )
        return []


def kept(results: Results, key: str, rows: list[Row]) -> list[Row]:
    if rows and key not in results.done:
        results.add(key, rows)
    return rows
