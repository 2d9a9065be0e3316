"""Loss by length on held-out text, and passkeys: the same before and after training."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from tqdm import tqdm  # type: ignore[import-untyped]

from ..errors import PosencError
from ..evaluation.measures.embeddings import Pooled, embedding_retrieval
from ..evaluation.measures.estimates import mean_and_error
from ..evaluation.measures.haystacks import Haystacks
from ..evaluation.measures.needles import Retrieval
from ..evaluation.measures.perplexity import Progress, Reading, perplexity, rows_together
from ..evaluation.measures.retrieval import retrieval
from ..evaluation.measures.rows import Row
from ..evaluation.measures.texts import Document, bos_of, spread_windows, tokenized, window_ids
from ..families import places
from ..patching.patch_state import is_patched
from ..patching.sizes import config_length
from .rows import IGNORED
from .settings import MeasureSettings

DEPTHS = 5
RETRIEVAL_TASKS = ("embed_passkey", "embed_needle")


def held_out_documents(texts: Sequence[str], tokenizer: Any, longest: int, asked: MeasureSettings) -> list[Document]:
    """The held-out texts that are long enough for the longest window, longest first."""
    named = {f"held out {i}": text for i, text in enumerate(texts) if text.strip()}
    every = tokenized(named, tokenizer) if named else []
    if not every:
        raise PosencError(
            "There is no held-out text to measure on: this text is too short. Give more text, or hold out more "
            "(data.held_out)."
        )
    long = sorted((d for d in every if len(d.ids) >= longest), key=lambda d: -len(d.ids))
    if not long:
        most = max(len(d.ids) for d in every)
        raise PosencError(
            f"The text that is held out is too short: it is measured at {longest} tokens, and the longest of its "
            f"{len(every)} documents has {most}. Give longer documents, hold out more (data.held_out), or measure at "
            "less (measure.lengths)."
        )
    return long[: asked.windows]


def windows_that_fit(documents: Sequence[Document], longest: int, asked: MeasureSettings) -> int:
    """The number of windows that the settings ask for, or that fit into the documents."""
    room = [1 + (len(document.ids) - longest) // asked.scored for document in documents]
    count = asked.windows
    while any(len(range(i, count, len(documents))) > most for i, most in enumerate(room)):
        count -= 1
    return count


def measure_model(
    model: Any,
    tokenizer: Any,
    documents: Sequence[Document],
    lengths: Sequence[int],
    asked: MeasureSettings,
    objective: str,
    label: str,
) -> list[Row]:
    """Measure every length that the model has positions for, with a progress bar."""
    training = model.training
    model.eval()
    longest = max(lengths)
    reading = Reading(windows=windows_that_fit(documents, longest, asked), scored=asked.scored)
    # An embedder truncates long texts, and is measured with that.
    within = [length for length in lengths if objective == "contrastive" or length <= reach(model)]
    takes = partial(MEASURES[objective], model, tokenizer, documents, reading=reading, longest=longest, asked=asked)
    passkeys = asked.passkeys if objective == "causal" else 0
    tokens = sum(length * (TEXTS[objective] * int(reading.windows or 0) + passkeys) for length in within)
    rows: list[Row] = []
    with tqdm(total=tokens, desc=f"measuring {label}", unit="tok", unit_scale=True, leave=False) as bar:
        for length in within:
            rows += takes(length=length, label=label, progress=bar.update)
            if passkeys:
                trials = Retrieval(trials=passkeys // DEPTHS, distractors=1)
                rows += retrieval(model, tokenizer, "passkey", length, asked=trials, scheme=label, progress=bar.update)
    model.train(training)
    return rows


def causal_loss(
    model: Any, tokenizer: Any, documents: Sequence[Document], *, length: int, longest: int, reading: Reading,
    asked: MeasureSettings, label: str, progress: Progress,
) -> list[Row]:  # fmt: skip
    """The loss of the last tokens of windows."""
    bos = bos_of(tokenizer, None)
    return perplexity(
        model, documents, length, longest=longest, reading=reading, bos=bos, scheme=label, progress=progress
    )


def retrieval_accuracy(
    model: Any, tokenizer: Any, documents: Sequence[Document], *, length: int, longest: int, reading: Reading,
    asked: MeasureSettings, label: str, progress: Progress,
) -> list[Row]:  # fmt: skip
    """How often an embedder finds a document by a fact hidden in it."""
    embedder, straws = Pooled(model, tokenizer), Haystacks(queries=asked.windows, documents=asked.windows)
    rows: list[Row] = []
    for task in RETRIEVAL_TASKS:
        rows += embedding_retrieval(
            embedder, task, length, asked=straws, documents=documents, scheme=label, progress=progress
        )
    return rows


def reach(model: Any) -> float:
    """The number of positions: a table that is not patched ends."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    where = places(base)
    return float("inf") if is_patched(base) or not where.has_table else float(config_length(where) or "inf")


@torch.no_grad()
def masked_loss(
    model: Any, tokenizer: Any, documents: Sequence[Document], *, length: int, longest: int, reading: Reading,
    asked: MeasureSettings, label: str, progress: Progress,
) -> list[Row]:  # fmt: skip
    """The loss of masked tokens at the end of windows: the same tokens at every length."""
    opening, closing = frame(tokenizer)
    extra = len(opening) + len(closing)
    windows = spread_windows(documents, length - extra, longest - extra, reading.scored, reading.windows)
    ids = window_ids(documents, windows, None)
    means: list[float] = []
    size = rows_together(length, model.device.type)
    for start in range(0, len(ids), size):
        rows, labels = [], []
        for number, row in enumerate(ids[start : start + size].tolist(), start):
            hidden, wanted = mask_last_tokens(row, tokenizer.mask_token_id, reading.scored, number)
            rows.append([*opening, *hidden, *closing])
            labels.append([*[IGNORED] * len(opening), *wanted, *[IGNORED] * len(closing)])
        targets = torch.tensor(labels, device=model.device)
        logits = model(input_ids=torch.tensor(rows, device=model.device)).logits.float()
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORED)
        counts = (targets != IGNORED).sum(1)
        means += (losses.view(targets.shape).sum(1) / counts).tolist()
        progress(targets.numel())
    value, error = mean_and_error(means)
    details = {"how": "a quarter of the last tokens hidden, the same at every length", "windows": len(windows)}
    row = Row(
        task="perplexity", protocol="masked", scheme=label, length=length, metric="loss", value=value, stderr=error,
        n=len(means), details={**details, "seeds": 0},
    )  # fmt: skip
    return [row]


def mask_last_tokens(ids: list[int], mask: int, scored: int, seed: int) -> tuple[list[int], list[int]]:
    """Mask a quarter of the last `scored` tokens; the tokens, and labels for the masked ones."""
    chosen = random.Random(seed).sample(range(len(ids) - scored, len(ids)), max(1, scored // 4))
    labels = [IGNORED] * len(ids)
    hidden = list(ids)
    for place in chosen:
        labels[place], hidden[place] = ids[place], mask
    return hidden, labels


def frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens that the tokenizer puts before and after a text."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    at = next(i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
    return whole[:at], whole[at + len(plain) :]


def lengths_upto(trained: int, target: int) -> list[int]:
    """The trained length and its doubles, up to the target."""
    found = [trained]
    while found[-1] * 2 < target:
        found.append(found[-1] * 2)
    return found if target <= trained else [*found, target]


MEASURES = {"causal": causal_loss, "masked": masked_loss, "contrastive": retrieval_accuracy}
TEXTS = {"causal": 1, "masked": 1, "contrastive": len(RETRIEVAL_TASKS)}
"""How many texts are read for each window."""
