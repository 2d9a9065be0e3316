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
    """Every figure that `options` asks for, and for a patched model its short-context tax.

    `reference` is what the tax is measured against; unless given, the same weights with the patch undone. `out` is a
    JSONL file that rows are appended to, and from which an interrupted run goes on. Embedding tasks take encoders and
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
    """What makes an evaluation the same one."""
    found = encoder_identity if options.embeds else decoder_identity
    return found(model, tokenizer, documents, options, reference)
