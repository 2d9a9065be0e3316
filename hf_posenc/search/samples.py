"""The samples that guide and judge a search: windows of text, or needles with only their answers scored."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ..errors import PosencError
from ..evaluation.measures.losses import token_losses
from ..evaluation.measures.needles import Retrieval, trials
from ..evaluation.measures.perplexity import rows_together
from ..evaluation.measures.texts import Document, spread_windows, window_ids

FITNESSES = ("loss", "needles")
NEEDLES = ("passkey", "multikey")
UNSEEN = 500_000
"""Added to the seed of the needles that judge a search, which must differ from those that guide it."""
SCORED = 64
GUIDING = 0.6
"""The share of each text that guides the search; the rest judges it."""


@dataclass(frozen=True)
class Sample:
    """Tokens, of which the last `scored` are scored."""

    ids: Tensor
    scored: int


def split(documents: Sequence[Document], needed: int) -> tuple[list[Document], list[Document]]:
    """Split every text into a guiding and a judging part. Too short texts are refused."""
    guiding: list[Document] = []
    judging: list[Document] = []
    for document in documents:
        at = int(len(document.ids) * GUIDING)
        for found, ids in ((guiding, document.ids[:at]), (judging, document.ids[at:])):
            if len(ids) >= needed:
                found.append(Document(document.name, ids, ""))
    if not guiding or not judging:
        most = max((len(document.ids) for document in documents), default=0)
        wanted = math.ceil(needed / min(GUIDING, 1 - GUIDING))
        raise PosencError(
            f"Text must be split into a part that guides the search and one that judges it, each of {needed} tokens "
            f"or more: a text of {wanted} tokens is needed, and the longest has {most}. Give a longer text, or a "
            "shorter target."
        )
    return guiding, judging


def text_samples(documents: Sequence[Document], length: int, count: int, bos: int | None) -> list[Sample]:
    """Windows spread over the texts with their ends scored: `count`, or as many as fit."""
    size = length - (bos is not None)
    scored = min(SCORED, size - 1)
    rooms = [1 + (len(document.ids) - size) // scored for document in documents]
    found: list[Sample] = []
    for document, each in zip(documents, shares(rooms, count), strict=True):
        if each:
            windows = spread_windows([document], size, size, scored, each)
            found += [Sample(window_ids([document], [w], bos)[0], w.scored) for w in windows]
    return found


def shares(rooms: Sequence[int], count: int) -> list[int]:
    """How many of `count` windows each text gets, in turns, as long as it has room."""
    found = [0] * len(rooms)
    for turn in range(max(rooms, default=0)):
        for index, room in enumerate(rooms):
            if turn < room and sum(found) < count:
                found[index] += 1
    return found


def needle_samples(tokenizer: Any, length: int, count: int, seed: int) -> list[Sample]:
    """Prompts that hide a number, followed by the answer, which alone is scored, as in LongRoPE2."""
    found: list[Sample] = []
    each = math.ceil(count / (5 * len(NEEDLES)))
    for task in NEEDLES:
        for trial in trials(task, length, tokenizer, Retrieval(trials=each, seed=seed)):
            answer = tokenizer(trial.answers[0], add_special_tokens=False)["input_ids"]
            found.append(Sample(torch.tensor([*trial.ids, *answer]), len(answer)))
    step = len(found) / count  # spread over all tasks and depths
    return [found[int(i * step)] for i in range(count)]


def sample_losses(model: Any, samples: Sequence[Sample]) -> list[float]:
    """The mean loss of each sample; infinite if it is not finite."""
    losses = [math.inf] * len(samples)

    def shape(index: int) -> tuple[int, int]:
        return len(samples[index].ids), samples[index].scored

    for (length, scored), group in groupby(sorted(range(len(samples)), key=shape), key=shape):
        indices, together = list(group), rows_together(length, model.device.type)
        for at in range(0, len(indices), together):
            part = indices[at : at + together]
            ids = torch.stack([samples[i].ids for i in part])
            try:
                found = token_losses(model, ids, last=scored)
            except PosencError:  # not finite
                continue
            for index, loss in zip(part, found.double().mean(-1).tolist(), strict=True):
                losses[index] = loss
    return losses
