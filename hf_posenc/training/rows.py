"""Rows of fixed length cut from documents. Each follows from its index and the seed alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from ..errors import PosencError
from .settings import DataSettings

IGNORED = -100
"""The label of a token that is not predicted, as everywhere in transformers."""


@dataclass(frozen=True)
class Row:
    """Tokens, and the lengths of their pieces, between which there is no attention."""

    ids: Sequence[int]
    pieces: Sequence[int]
    positions: Sequence[int] | None = None
    """By default they count from 0 in each piece."""
    answers: Sequence[bool] | None = None
    """Tokens with a higher weight in the loss."""
    predicted: Sequence[bool] | None = None
    """Tokens that are trained on; by default all."""
    padding: int = 0
    """Padding tokens at the end, which are a separate piece."""


class Cuts(Protocol):
    """Text in memory that rows are cut from, each by its index and the seed."""

    def cut(self, index: int, room: int, seed: int) -> Row: ...

    def refuse_short(self, length: int, room: int) -> None:
        """Raise if there is not enough text for a row."""


class Stream:
    """Concatenated documents, and where each starts."""

    def __init__(self, documents: Iterable[Sequence[int]]):
        parts = [np.asarray(document, dtype=np.int32) for document in documents]
        self.tokens = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)
        self.starts = np.cumsum([0, *(len(part) for part in parts)])[:-1]
        self.orders: dict[tuple[int, int], Tensor] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def row(self, start: int, length: int) -> Row:
        inner = self.starts[(self.starts > start) & (self.starts < start + length)] - start
        pieces = np.diff([0, *inner.tolist(), length]).tolist()
        return Row(self.tokens[start : start + length].tolist(), pieces)

    def cut(self, index: int, room: int, seed: int) -> Row:
        """Cut on a grid. Each pass over the text shifts the grid, and shuffles the rows."""
        count = len(self) // room
        passes, place = divmod(index, count)
        if (room, passes) not in self.orders:
            order = torch.randperm(count, generator=torch.Generator().manual_seed(seed + passes))
            self.orders[room, passes] = order
        shift = random.Random(f"{seed}/{passes}").randrange(len(self) - count * room + 1)
        return self.row(int(self.orders[room, passes][place]) * room + shift, room)

    def refuse_short(self, length: int, room: int) -> None:
        if len(self) < room:
            raise PosencError(
                f"The text is too short: rows of {length} tokens are asked for, and all documents to train on have "
                f"{len(self)} together. Give more text (data.path), or ask for less (data.length)."
            )


def in_short_pieces(row: Row, length: int) -> Row:
    """The same tokens in pieces of at most `length`."""
    pieces = [p for piece in row.pieces for p in [length] * (piece // length) + [piece % length] if p]
    return replace(row, pieces=pieces)


def skip_positions(row: Row, rng: random.Random, target: int, chunks: int) -> Row:
    """PoSE: one piece whose positions skip ahead between chunks, to train distances up to `target`."""
    length = len(row.ids)
    cuts = sorted(rng.sample(range(1, length), chunks - 1))
    leaps = [0, *sorted(rng.randint(0, target - length) for _ in cuts)]
    sizes = np.diff([0, *cuts, length]).tolist()
    starts = [0, *accumulate(sizes)]
    positions = [
        p + leap for start, size, leap in zip(starts, sizes, leaps, strict=False) for p in range(start, start + size)
    ]
    return replace(row, pieces=[length], positions=positions)


def scatter_positions(row: Row, rng: random.Random, target: int) -> Row:
    """Randomized positions: one piece at sorted random positions below `target`."""
    length = len(row.ids)
    return replace(row, pieces=[length], positions=sorted(rng.sample(range(target), length)))


def causal_inputs(row: Row) -> dict[str, Tensor]:
    """The inputs of a decoder. transformers finds document boundaries where positions restart, unless given a mask."""
    labels = list(row.ids)
    for start in accumulate(row.pieces[:-1]):
        labels[start] = IGNORED  # the first token of a piece cannot be predicted
    if row.predicted is not None:
        labels = [label if wanted else IGNORED for label, wanted in zip(labels, row.predicted, strict=True)]
    inputs: dict[str, Any] = {"input_ids": row.ids, "labels": labels, "position_ids": positions_of(row)}
    if row.positions is not None:
        inputs["attention_mask"] = [1] * len(row.ids)  # otherwise a skip would be taken for a boundary
    if row.answers is not None:
        inputs["answers"] = row.answers
    if row.padding:
        inputs["padding"] = row.padding
    return {name: torch.tensor(values) for name, values in inputs.items()}


def positions_of(row: Row) -> Sequence[int]:
    return row.positions if row.positions is not None else [p for piece in row.pieces for p in range(piece)]


@dataclass(frozen=True)
class Masking:
    """Masked language modelling as in BERT: of the chosen tokens 80 % masked, 10 % random, 10 % unchanged."""

    mask: int
    special: frozenset[int]
    vocabulary: int
    share: float

    def inputs(self, row: Row, rng: random.Random) -> dict[str, Tensor]:
        places = [i for i, token in enumerate(row.ids) if token not in self.special]
        chosen = sorted(rng.sample(places, max(1, round(self.share * len(places)))))
        ids, labels = list(row.ids), [IGNORED] * len(row.ids)
        for place in chosen:
            labels[place], fate = ids[place], rng.random()
            if fate < 0.9:
                ids[place] = self.mask if fate < 0.8 else rng.randrange(self.vocabulary)
        inputs = {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels)}
        inputs["position_ids"] = torch.tensor(positions_of(row))
        if len(row.pieces) > 1:
            piece = torch.repeat_interleave(torch.arange(len(row.pieces)), torch.tensor(row.pieces))
            inputs["attention_mask"] = (piece[:, None] == piece)[None]  # encoders do not find boundaries by themselves
        return inputs


Inputs = Callable[[Row, random.Random], dict[str, Tensor]]
Special = Callable[[random.Random, int], Row]
"""Makes a row that is not cut from the text, such as a passkey, from a generator and a length."""


@dataclass(frozen=True)
class Plan:
    """How the rows of a run are made from text, by index."""

    asked: DataSettings
    stages: Sequence[tuple[int, int]]
    """The number of rows and their length, for each stage in order."""
    seed: int
    inputs: Inputs
    special: Special | None = None
    frame: tuple[Sequence[int], Sequence[int]] = ((), ())
    """Special tokens before and after every row of an encoder."""

    def __len__(self) -> int:
        return sum(rows for rows, _ in self.stages)

    def tokens(self, rows: int) -> int:
        """The number of tokens in the first `rows` rows."""
        found = 0
        for count, length in self.stages:
            found += min(rows, count) * length
            rows -= min(rows, count)
        return found

    def length(self, index: int) -> int:
        for rows, length in self.stages:
            if index < rows:
                return length
            index -= rows
        raise IndexError(index)

    def generator(self, index: int) -> random.Random:
        return random.Random(f"{self.seed}/{index}")

    def room(self, length: int) -> int:
        """Tokens of text in a row."""
        return length - len(self.frame[0]) - len(self.frame[1])

    def make_inputs(self, index: int, text: Callable[[int], Row]) -> dict[str, Tensor]:
        """The inputs of a row; `text` cuts the given number of tokens."""
        rng = self.generator(index)
        special, length = rng.random() < self.asked.passkey, self.length(index)
        if special and self.special is not None:
            return self.inputs(self.special(rng, length), rng)
        row = text(self.room(length))
        if self.asked.documents == "joined":
            row = replace(row, pieces=[len(row.ids)])
        if self.asked.short and rng.random() < self.asked.short.share:
            row = in_short_pieces(row, self.asked.short.length)
        row = add_frame(row, *self.frame)
        if self.asked.pose:
            row = skip_positions(row, rng, self.asked.pose.target_length, self.asked.pose.chunks)
        elif self.asked.randomized:
            row = scatter_positions(row, rng, self.asked.randomized.target_length)
        return self.inputs(row, rng)


def stages(asked: DataSettings, steps: int, a_step: int) -> list[tuple[int, int]]:
    """How many rows of each length a run of `steps` steps has, in order."""
    early = [(stage.steps * a_step, stage.length) for stage in asked.stages]
    left = steps * a_step - sum(rows for rows, _ in early)
    if left <= 0:
        raise PosencError(
            f"data.stages take {sum(stage.steps for stage in asked.stages)} of the {steps} steps of train.max_steps, "
            f"and no step is left for rows of {asked.length}: use fewer."
        )
    return [*early, (left, asked.length)]


def add_frame(row: Row, opening: Sequence[int], closing: Sequence[int]) -> Row:
    if not opening and not closing:
        return row
    pieces = [*row.pieces]
    pieces[0] += len(opening)
    pieces[-1] += len(closing)
    return replace(row, ids=[*opening, *row.ids, *closing], pieces=pieces)


class TrainingRows(Dataset[dict[str, Tensor]]):
    """The rows of a whole run, in order."""

    def __init__(self, text: Cuts, plan: Plan):
        self.text, self.plan = text, plan
        for length in {length for _, length in plan.stages}:
            text.refuse_short(length, plan.room(length))

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.plan.make_inputs(index, lambda room: self.text.cut(index, room, self.plan.seed))


Cutter = Callable[[int, int], Row]
"""Cuts the row of an index with so many tokens; indices come in order."""


class StreamedRows(IterableDataset[dict[str, Tensor]]):
    """The rows of a run from text that is read while training, in order, repeated as needed."""

    def __init__(self, cutter: Callable[[], Cutter], plan: Plan):
        self.cutter, self.plan = cutter, plan

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        cut = self.cutter()
        for index in range(len(self.plan)):
            yield self.plan.make_inputs(index, partial(cut, index))


def in_order(documents: Callable[[], Iterator[Sequence[int]]]) -> Cutter:
    """Rows of documents in order, without gaps."""
    waiting: list[Sequence[int]] = []
    source = repeat_endlessly(documents)

    def cut(index: int, room: int) -> Row:
        ids: list[int] = []
        pieces: list[int] = []
        while len(ids) < room:
            document = waiting.pop() if waiting else next(source)
            part, rest = document[: room - len(ids)], document[room - len(ids) :]
            ids += part
            pieces.append(len(part))
            if rest:
                waiting.append(rest)
        return Row(ids, pieces)

    return cut


T = TypeVar("T")


def repeat_endlessly(documents: Callable[[], Iterator[T]]) -> Iterator[T]:
    while True:
        empty = True
        for document in documents():
            empty = False
            yield document
        if empty:
            raise PosencError("The stream of documents is empty: there is nothing to train on.")


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """A batch of rows, which are equally long. A key that one row has is added to all others."""
    if any("answers" in row for row in rows):
        for row in rows:
            row.setdefault("answers", torch.zeros(len(row["input_ids"]), dtype=torch.bool))
    if any("attention_mask" in row for row in rows):
        square = any(row["attention_mask"].dim() > 1 for row in rows if "attention_mask" in row)
        for row in rows:
            length = len(row["input_ids"])
            ones = (
                torch.ones((1, length, length), dtype=torch.bool) if square else torch.ones(length, dtype=torch.long)
            )
            row.setdefault("attention_mask", ones)
    if any("padding" in row for row in rows):
        for row in rows:
            row.setdefault("padding", torch.tensor(0))
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
