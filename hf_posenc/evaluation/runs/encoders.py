"""Runs of encoders: retrieval from long texts by embeddings, and the cost on short texts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from ...errors import PosencError
from ...patching.embedders import is_embedder
from ...patching.lengths import trained_length
from ...patching.patch import unpatch_model
from ...patching.patch_state import is_patched, unwrap_model
from ..measures.embeddings import PASSAGES, Chunked, Embedder, embed, embedder_of, embedding_retrieval, passages
from ..measures.embeddings import similarity_rows as moved
from ..measures.haystacks import haystacks
from ..measures.losses import vocabulary_of
from ..measures.perplexity import Progress, rows_together
from ..measures.processes import ALONE, Processes
from ..measures.rows import Row
from ..measures.texts import Document, refuse_missing, refuse_strange_tokens
from .budget import estimate, refuse_oversized
from .entries import CHUNKED, Entry, parsed_schemes, patch_with
from .jobs import Job, perform, progress_bar, scheme_of
from .options import Options
from .results import Results, fingerprint, model_digest
from .tax import UNPATCHED, positions_undone

SHORTEST = 8
"""The shortest texts whose embeddings are compared, in tokens."""


@dataclass(frozen=True)
class Corpus:
    """The inputs of a run, the same for every model and scheme."""

    tokenizer: Any
    documents: Sequence[Document]
    options: Options
    trained: int
    shared: Processes = ALONE

    def embedder(self, model: Any) -> Embedder:
        return model if isinstance(model, Chunked) else embedder_of(model, self.tokenizer)

    def jobs(self) -> list[Job]:
        return [self.retrieval_job(task, length) for task in self.options.tasks for length in self.options.lengths]

    def retrieval_job(self, task: str, length: int) -> Job:
        asked, size = self.options.haystacks, self.options.reading.batch_size
        one = replace(asked, queries=1, documents=1)
        haystacks(task, length, self.tokenizer, one, self.documents)  # raises now, not after hours, if no text fits

        def run(model: Any, scheme: str, progress: Progress) -> list[Row]:
            return embedding_retrieval(
                self.embedder(model), task, length, asked=asked, documents=self.documents, batch_size=size,
                scheme=scheme, progress=progress, shared=self.shared,
            )  # fmt: skip

        return Job(f"{task}/{length}", length, asked.documents * length, run)

    def similarity_jobs(self, plain: Callable[[Any], Any]) -> list[Job]:
        """Jobs on texts within the trained length; `plain` gives the model without its patch."""
        lengths = (self.trained // 8, self.trained // 2) if any(d.text for d in self.documents) else ()
        return [self.similarity_job(plain, length) for length in lengths if length >= SHORTEST]

    def similarity_job(self, plain: Callable[[Any], Any], length: int) -> Job:
        texts = passages(self.documents, length, self.tokenizer)
        size = self.options.reading.batch_size

        def run(model: Any, scheme: str, progress: Progress) -> list[Row]:
            def vectors(of: Any) -> Any:
                made = self.embedder(of)
                device, sizes = made.model.device.type, [length] * len(texts)
                return embed(made.documents, texts, sizes, size, device, progress, self.shared)

            after = vectors(model)
            with plain(model) as other:
                return moved(vectors(other), after, scheme, length)

        return Job(f"similarity/{length}", length, 2 * PASSAGES * length, run)


@contextmanager
def without_patch(model: Any) -> Iterator[Any]:
    """The model without its patch, within a `with` block."""
    if isinstance(model, Chunked):
        yield model.whole.model
        return
    with positions_undone(model):
        yield model


def lend(reference: Any) -> Callable[[Any], Any]:
    @contextmanager
    def use_reference(model: Any) -> Iterator[Any]:
        yield reference.eval()

    return use_reference


def prepare_corpus(
    model: Any, tokenizer: Any, documents: Sequence[Document], options: Options, force: bool, shared: Processes
) -> Corpus:
    """Check everything that could fail later, and return what can be measured."""
    refuse_missing(tokenizer)
    refuse_strange_tokens(documents, vocabulary_of(model))
    embedder_of(model, tokenizer)
    warn_of_decoder(model)
    length = max(options.lengths)
    rows = options.reading.batch_size or rows_together(length, model.device.type)
    refuse_oversized(model, estimate(model, rows, length, chunk=1), force)
    return Corpus(tokenizer, documents, options, trained_length(model), shared)


def warn_of_decoder(model: Any) -> None:
    """Warn that a model which predicts the next token was not trained to embed texts."""
    inner = unwrap_model(model)
    if not is_embedder(model) and inner.can_generate() and not getattr(inner.config, "is_encoder_decoder", False):
        warnings.warn(
            f"{type(inner).__name__} predicts the next token and was hardly trained to embed texts: the mean of its "
            "last hidden states is measured. For decoders use --tasks passkey or multikey; embed_ tasks are for "
            "encoders and SentenceTransformers.",
            stacklevel=4,
        )


def warn_of_cuts(embedder: Embedder, scheme: str, lengths: Sequence[int]) -> None:
    limit = embedder.limit
    if limit is not None and max(lengths) > limit:
        warnings.warn(f"{scheme} reads {limit} tokens of a text, and truncates longer ones.", stacklevel=3)


def encoder_identity(
    model: Any, tokenizer: Any, documents: Sequence[Document], options: Options, reference: Any = None, **more: Any
) -> dict[str, Any]:
    """What identifies an evaluation, for resuming it."""
    made = embedder_of(model, tokenizer)
    values = {**options.identity(), "pooling": made.pooling, "limit": made.limit, **more}
    if reference is not None:
        values["reference"] = model_digest(reference.eval())
    return fingerprint(model, tokenizer, documents, values)


def evaluate_encoder(
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
    """Retrieval by embeddings at every length; for a patched model and with text, also the cost on short texts."""
    model.eval()
    scheme = scheme_of(model)
    corpus = prepare_corpus(model, tokenizer, documents, options, force, shared)
    warn_of_cuts(corpus.embedder(model), scheme, options.lengths)
    jobs = corpus.jobs()
    paid = (
        corpus.similarity_jobs(without_patch if reference is None else lend(reference)) if scheme != UNPATCHED else []
    )
    if reference is not None and not paid:
        raise PosencError(
            "A reference is for comparing embeddings of short texts, which is not done here: "
            f"{'there is no text' if scheme != UNPATCHED else 'the model is not patched'}. Leave --reference out."
        )
    results = Results(out, encoder_identity(model, tokenizer, documents, options, reference), shared)
    with progress_bar([(scheme, job) for job in [*jobs, *paid]], results, quiet) as bar:
        rows = perform(model, scheme, jobs, results, bar.update)
        try:
            rows += perform(model, scheme, paid, results, bar.update)
        except PosencError as error:
            warnings.warn(
                f"The cost on short texts was not measured: {error} Name the unpatched model with --reference.",
                stacklevel=3,
            )
    return rows


def compare_encoders(
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
    """The unpatched model, which truncates long texts, and every scheme; `chunked` averages over pieces."""
    if hasattr(unwrap_model(model), "peft_config") or is_patched(model):
        raise PosencError("compare starts from an unpatched model without adapters; this one is patched or adapted.")
    model.eval()
    entries = parsed_schemes(schemes) if isinstance(schemes, str) else list(schemes)
    corpus = prepare_corpus(model, tokenizer, documents, options, force, shared)
    for entry in entries:  # fail now, not after an hour of measuring the first one
        with with_scheme(model, entry, corpus, target_length):
            pass
    jobs, paid = corpus.jobs(), corpus.similarity_jobs(without_patch)
    labels = [entry.label for entry in entries]
    more = {"schemes": labels, "target_length": target_length}
    results = Results(out, encoder_identity(model, tokenizer, documents, options, **more), shared)
    due = [(UNPATCHED, job) for job in jobs] + [(label, job) for label in labels for job in [*jobs, *paid]]
    with progress_bar(due, results, quiet) as bar:
        warn_of_cuts(corpus.embedder(model), UNPATCHED, options.lengths)
        rows = perform(model, UNPATCHED, jobs, results, bar.update)
        for entry in entries:
            with with_scheme(model, entry, corpus, target_length) as reader:
                warn_of_cuts(corpus.embedder(reader), entry.label, options.lengths)
                rows += perform(reader, entry.label, [*jobs, *paid], results, bar.update)
    return rows


@contextmanager
def with_scheme(model: Any, entry: Entry, corpus: Corpus, target_length: int) -> Iterator[Any]:
    """The model with a scheme, within a `with` block."""
    if entry.scheme == CHUNKED:
        yield Chunked(corpus.embedder(model), corpus.trained)
        return
    patch_with(model, entry, target_length)
    try:
        yield model
    finally:
        unpatch_model(model)
