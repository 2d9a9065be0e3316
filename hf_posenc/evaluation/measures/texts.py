"""Tokenized text, and the windows cut from it. A text that is too short is refused, with the length needed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import PosencError
from .text_files import read_texts

WINDOWS = 20
"""How many windows are cut by default, if the text has room."""


@dataclass(frozen=True)
class Document:
    """A text as tokens, without special tokens."""

    name: str
    ids: Tensor
    text: str = ""

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.ids.to(torch.int64).numpy().tobytes()).hexdigest()[:16]


@dataclass(frozen=True)
class Window:
    """Tokens `start` to `end` of a document, of which the last `scored` count."""

    document: int
    start: int
    end: int
    scored: int


def tokenized(texts: Mapping[str, str], tokenizer: Any) -> list[Document]:
    """Tokenize texts, given by name."""
    refuse_missing(tokenizer)
    found = []
    for name, text in texts.items():
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if not ids:
            raise PosencError(f"The text {name!r} is empty: there is nothing to read.")
        found.append(Document(name, torch.tensor(ids), text))
    return found


def read_documents(paths: Iterable[str | os.PathLike[str]], tokenizer: Any) -> list[Document]:
    """Documents of text files in UTF-8: files, folders and patterns."""
    return tokenized(read_texts(paths), tokenizer)


def refuse_missing(tokenizer: Any) -> None:
    if tokenizer is None:
        raise PosencError(
            "There is no tokenizer to read text with. Save one beside the model (tokenizer.save_pretrained(path)), or "
            "name where one is: --tokenizer PATH."
        )


def refuse_strange_tokens(documents: Sequence[Document], vocabulary: int) -> None:
    """Raise for tokens that the model has no embedding for."""
    for document in documents:
        most = int(document.ids.max())
        if most >= vocabulary:
            raise PosencError(
                f"The tokenizer makes token {most} of {document.name!r}, and the model knows {vocabulary}: they do "
                "not belong together. Name the model's own tokenizer."
            )


def bos_of(tokenizer: Any, wanted: bool | None) -> int | None:
    """The BOS token to start windows with, or None: as the tokenizer does, unless `wanted` says."""
    token: int | None = getattr(tokenizer, "bos_token_id", None)
    if wanted is None:
        opened = tokenizer("a")["input_ids"]
        return token if token is not None and opened[:1] == [token] else None
    if wanted and token is None:
        raise PosencError("This tokenizer has no BOS token to start windows with. Measure without one (--no-bos).")
    return token if wanted else None


def refuse_short(documents: Sequence[Document], needed: int, why: str) -> None:
    for document in documents:
        if len(document.ids) < needed:
            raise PosencError(
                f"{document.name!r} is too short for {why}: {needed} tokens are needed, and it has "
                f"{len(document.ids)}. Give a longer text, or ask for less."
            )


def spread_windows(
    documents: Sequence[Document], length: int, longest: int, scored: int, count: int | None
) -> list[Window]:
    """Windows of `length` with the same ends as windows of `longest`, spread evenly over the documents."""
    if scored >= length:
        raise PosencError(f"The last {scored} tokens of windows of {length} cannot be scored: score fewer.")
    refuse_short(documents, longest, f"windows of {longest} tokens")
    found = []
    for index, document in enumerate(documents):
        each = len(range(index, count or WINDOWS, len(documents)))
        room = len(document.ids) - longest
        if count is None:
            each = min(each, 1 + room // scored)
        if each:
            why = f"{each} windows of {longest} tokens, {scored} of each scored once"
            refuse_short([document], longest + (each - 1) * scored, why)
            ends = [longest + (room * i // (each - 1) if each > 1 else room // 2) for i in range(each)]
            found += [Window(index, end - length, end, scored) for end in ends]
    return found


def window_ids(documents: Sequence[Document], windows: Sequence[Window], bos: int | None) -> Tensor:
    """Rows of tokens, which start with `bos` if there is one."""
    rows = torch.stack([documents[w.document].ids[w.start : w.end] for w in windows])
    return rows if bos is None else torch.cat([torch.full((len(rows), 1), bos), rows], -1)
