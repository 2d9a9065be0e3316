"""LongEmbed's tasks through MTEB, on a live encoder: passkeys and needles by length, and four real ones."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import PosencError, suggestion
from ...extras import require
from ...patching.embedders import is_embedder
from ..measures.embeddings import Embedder, embed, embedder_of
from ..measures.retrieval import accuracy
from ..measures.rows import Row
from ..measures.texts import refuse_missing
from ..runs.jobs import scheme_of
from ..runs.results import Results

SUITE = "lemb"
BY_LENGTH = ("LEMBPasskeyRetrieval", "LEMBNeedleRetrieval")
WHOLE = (
    "LEMBNarrativeQARetrieval",
    "LEMBQMSumRetrieval",
    "LEMBSummScreenFDRetrieval",
    "LEMBWikimQARetrieval",
)
LENGTHS = tuple(256 * 2**k for k in range(8))


def is_lemb(group: str) -> bool:
    """Whether a name is a LongEmbed task, not one of lm-eval."""
    return any(name.strip().lower().startswith(SUITE) for name in group.split(","))


def task_names(group: str) -> list[str]:
    """The tasks of `lemb` or of names with commas."""
    found: list[str] = []
    for name in filter(None, (part.strip() for part in group.split(","))):
        if name == SUITE:
            found += [*BY_LENGTH, *WHOLE]
        elif name in (*BY_LENGTH, *WHOLE):
            found.append(name)
        else:
            raise PosencError(
                f"Unknown task of LongEmbed {name!r}.{suggestion(name, [SUITE, *BY_LENGTH, *WHOLE])} Tasks of lm-eval "
                "are for decoders: run them separately."
            )
    return list(dict.fromkeys(found))


def plan_lemb(model: Any, tokenizer: Any, group: str, lengths: Sequence[int]) -> list[tuple[str, str, int]]:
    """Tasks with their splits and lengths; raises for all mistakes that can be found before anything runs."""
    wanted, names = sorted(set(lengths)), task_names(group)
    refuse_missing(tokenizer)
    embedder_of(model, tokenizer)
    odd = [length for length in wanted if length not in LENGTHS and set(names) & set(BY_LENGTH)]
    if odd:
        raise PosencError(f"LongEmbed's passkeys and needles have no length {odd[0]}; they have {LENGTHS}.")
    mteb_of()
    by_length = [(name, f"test_{length}", length) for name in names if name in BY_LENGTH for length in wanted]
    return by_length + [(name, "", wanted[-1]) for name in names if name in WHOLE]


def mteb_of() -> Any:
    """MTEB, which runs LongEmbed's tasks and is an extra."""
    return require("mteb", "embed", "LongEmbed (--tasks embed_passkey,embed_needle are similar and work without it)")


def evaluate_lemb(
    model: Any,
    tokenizer: Any,
    group: str,
    lengths: Sequence[int],
    *,
    batch_size: int | None = None,
    results: Results | None = None,
) -> list[Row]:
    """A row for each task of `group` (`lemb`, or names with commas), and each length where a task has several.

    The four real tasks have documents of any length, truncated at the longest of `lengths` and at the model's limit.
    Jobs in `results` are not run again, and new ones are added.
    """
    plan = plan_lemb(model, tokenizer, group, lengths)
    kept, scheme, rows = results or Results(None, {}), scheme_of(model), []
    todo = [(name, split, n) for name, split, n in plan if _key(scheme, name, n) not in kept.done]
    tasks = {name: load_task(name) for name in dict.fromkeys(name for name, _, _ in todo)}  # fail now, not after hours
    for name, split, length in plan:
        key = _key(scheme, name, length)
        if key not in kept.done:
            task = tasks[name]
            kept.add(
                key, [measure_task(model, tokenizer, task, split or task.eval_splits[0], length, scheme, batch_size)]
            )
        rows += kept.done[key]
    return rows


def _key(scheme: str, name: str, length: int) -> str:
    return f"{scheme}/lemb/{name}/{length}"


def load_task(name: str) -> Any:
    """Load a task with its documents."""
    task = mteb_of().get_task(name)
    try:
        with quiet():
            task.load_data()
    except (OSError, RuntimeError) as error:  # raised by hub clients
        told = (str(error).splitlines() or [type(error).__name__])[0]
        raise PosencError(
            f"{name} needs data that cannot be reached ({told}). Without a network, "
            "--tasks embed_passkey,embed_needle measure the same on generated documents."
        ) from None
    return task


def measure_task(
    model: Any, tokenizer: Any, task: Any, split: str, length: int, scheme: str, batch_size: int | None = None
) -> Row:
    """Run one task at one length with MTEB's scoring: accuracy at 1, or the task's main score."""
    mteb = mteb_of()
    count = len(task.dataset[next(iter(task.dataset))][split]["queries"])
    with embedder_with_limit(model, tokenizer, length) as embedder, quiet():
        task.filter_eval_splits([split])
        done = mteb.evaluate(
            Encoder(embedder, scheme, batch_size), task, cache=None, show_progress_bar=False, co2_tracker=False
        )
    scores = done.task_results[0].scores[split][0]
    first = task.metadata.main_score == "ndcg_at_1"  # with one right document, the share of queries that find it
    value = float(scores["ndcg_at_1" if first else task.metadata.main_score])
    error = accuracy([1.0] * round(value * count) + [0.0] * (count - round(value * count)))[1] if first else None
    details = {
        "how": f"MTEB's {task.metadata.main_score}" + ("; error after Agresti and Coull" if first else ""),
        "split": split,
        "read": embedder.limit or length,
        "pooling": embedder.pooling,
        "version": mteb.__version__,
    }
    return Row(
        task=task.metadata.name, protocol="mteb", scheme=scheme, length=length,
        metric="accuracy" if first else task.metadata.main_score, value=value, stderr=error, n=count, details=details,
    )  # fmt: skip


@contextmanager
def embedder_with_limit(model: Any, tokenizer: Any, length: int) -> Iterator[Embedder]:
    """An embedder that reads at most `length` tokens, within a `with` block."""
    before = model.max_seq_length if is_embedder(model) else None
    try:
        if before is not None:
            model.max_seq_length = min(before, length)
        embedder = embedder_of(model, tokenizer)
        embedder.limit = min(embedder.limit or length, length)
        yield embedder
    finally:
        if before is not None:
            model.max_seq_length = before


class Encoder:
    """The model as MTEB sees it."""

    def __init__(self, embedder: Embedder, scheme: str, batch_size: int | None):
        from mteb.models.model_meta import ModelMeta

        self.embedder, self.batch_size = embedder, batch_size
        self.mteb_model_meta = ModelMeta.create_empty({"name": f"hf-posenc/{scheme}"})

    @torch.no_grad()
    def encode(self, inputs: Any, *, prompt_type: Any = None, **kwargs: Any) -> Any:
        texts = [text for batch in inputs for text in batch["text"]]
        asking = getattr(prompt_type, "value", prompt_type) == "query"
        make = self.embedder.queries if asking else self.embedder.documents
        limit = self.embedder.limit or 1
        sizes = [min(1 + len(text) // 4, limit) for text in texts]  # tokens, about
        return embed(make, texts, sizes, self.batch_size, self.embedder.model.device.type).numpy()

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        return unit(embeddings1) @ unit(embeddings2).T

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        return (unit(embeddings1) * unit(embeddings2)).sum(-1)


def unit(vectors: Any) -> Tensor:
    return F.normalize(torch.as_tensor(vectors).float(), dim=-1)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence MTEB's log of every step."""
    loggers = [logging.getLogger(name) for name in ("mteb", "datasets")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
