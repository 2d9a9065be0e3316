"""`evaluate`: the measurements of one model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..measures.processes import ALONE, Processes
from ..measures.rows import Row
from ..measures.texts import Document
from .decoders import decoder_identity, evaluate_decoder
from .encoders import encoder_identity, evaluate_encoder
from .options import Options


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
    shared: Processes = ALONE,
) -> list[Row]:
    """Measure everything that `options` asks for, and for a patched model its short-context tax.

    The tax is measured against `reference`, by default the same model with the patch undone. `out` is a JSONL file:
    results are appended to it, and an interrupted run resumes from it. Embedding tasks take encoders and
    SentenceTransformers, and compare embeddings of short texts instead of losses.
    """
    run = evaluate_encoder if options.embeds else evaluate_decoder
    return run(
        model, tokenizer, documents, options=options, reference=reference, out=out, force=force, quiet=quiet,
        shared=shared,
    )  # fmt: skip


def identity(
    model: Any, tokenizer: Any, documents: Sequence[Document], options: Options, reference: Any = None
) -> dict[str, Any]:
    """What identifies an evaluation, for resuming it."""
    found = encoder_identity if options.embeds else decoder_identity
    return found(model, tokenizer, documents, options, reference)
