"""Several texts in one run: the source of a row follows from its index and the seed."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from .rows import Cuts, Cutter, Row, Stream
from .settings import LongDocuments


class Choice:
    """The source of each row of a run, and how many earlier rows came from it."""

    def __init__(self, weights: Sequence[float], rows: int, seed: int):
        rng = random.Random(f"{seed}/sources")
        self.chosen = np.asarray(rng.choices(range(len(weights)), weights, k=rows), dtype=np.int32)
        one = self.chosen[:, None] == np.arange(len(weights))
        self.before = (np.cumsum(one, axis=0) - one)[np.arange(rows), self.chosen]

    def __getitem__(self, index: int) -> tuple[int, int]:
        return int(self.chosen[index]), int(self.before[index])


@dataclass(frozen=True)
class Mixture:
    """Rows from several texts."""

    parts: Sequence[Cuts]
    choice: Choice

    def cut(self, index: int, room: int, seed: int) -> Row:
        part, number = self.choice[index]
        return self.parts[part].cut(number, room, seed)

    def refuse_short(self, length: int, room: int) -> None:
        for part in self.parts:
            part.refuse_short(length, room)


def mix_in_order(cutters: Sequence[Cutter], choice: Choice) -> Cutter:
    """Rows from several texts that are read while training."""

    def cut(index: int, room: int) -> Row:
        part, number = choice[index]
        return cutters[part](number, room)

    return cut


def split_by_length(documents: Iterable[Sequence[int]], asked: LongDocuments) -> list[tuple[Stream, float]]:
    """Split documents into long and other ones, each with its share of rows."""
    long: list[Sequence[int]] = []
    others: list[Sequence[int]] = []
    for document in documents:
        (long if len(document) >= asked.tokens else others).append(document)
    streams = [(Stream(part), weight) for part, weight in ((long, asked.weight), (others, 1.0)) if part]
    total = sum(len(stream) * weight for stream, weight in streams)
    return [(stream, len(stream) * weight / total) for stream, weight in streams]
