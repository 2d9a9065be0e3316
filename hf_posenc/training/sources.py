"""Where a recipe's text comes from: the Python installation, files, or a dataset; and which of it is held out."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ..errors import PosencError, suggestion
from .settings import DataSettings
from .stdlib import stdlib_texts

LARGE = 2**28
"""Bytes of text beyond which it is read while training."""
MANY = 20
"""Fewer documents than this are not held out whole: of each one the end is."""
READERS = {".txt": "text", ".md": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
AHEAD = 20_000
"""Documents of a stream among which those held out are looked for."""


@dataclass(frozen=True)
class Corpus:
    """Text to train on, and text that is only measured."""

    name: str
    documents: Callable[[], Iterator[str]]
    """A new pass over the texts to train on, in their order."""
    held_out: list[str]
    streamed: bool = False


def corpus(asked: DataSettings) -> Corpus:
    """The text that a recipe names."""
    if asked.path == "stdlib":
        return Corpus("stdlib", lambda: iter(stdlib_texts().values()), list(stdlib_texts(held_out=True).values()))
    names = [asked.path] if isinstance(asked.path, str) else asked.path
    files = [file for name in names for file in matching(name)]
    if files:
        size = sum(os.path.getsize(file) for file in files)
        streamed = size > LARGE if asked.streaming is None else asked.streaming
        return split(", ".join(names), lambda: from_files(files, asked.column), asked.held_out, streamed)
    if isinstance(asked.path, list):
        raise PosencError(f"None of these files is there: {', '.join(names)}.")
    refuse_path(asked.path)
    streamed = is_large(asked) if asked.streaming is None else asked.streaming
    return split(asked.path, lambda: from_hub(asked, streamed), asked.held_out, streamed)


def split(name: str, documents: Callable[[], Iterator[str]], share: float, streamed: bool) -> Corpus:
    """Hold a share out: whole documents, found by a hash of their text; of a few books, the end of each."""
    if streamed:
        kept = [text for text in islice(documents(), AHEAD) if is_held_out(text, share)]
        return Corpus(name, lambda: (t for t in documents() if not is_held_out(t, share)), kept, streamed=True)
    texts = [text for text in documents() if text.strip()]
    if not texts:
        raise PosencError(f"{name} holds no text.")
    if len(texts) >= MANY:
        kept = [text for text in texts if is_held_out(text, share)]
        if kept:
            trained = [text for text in texts if not is_held_out(text, share)]
            return Corpus(name, lambda: iter(trained), kept)
    ends = [int(len(text) * (1 - share)) for text in texts]
    trained = [text[:end] for text, end in zip(texts, ends, strict=True)]
    return Corpus(name, lambda: iter(trained), [text[end:] for text, end in zip(texts, ends, strict=True)])


def is_held_out(text: str, share: float) -> bool:
    return int.from_bytes(hashlib.sha256(text.encode(errors="replace")).digest()[:4], "big") < share * 2**32


def matching(name: str) -> list[str]:
    """The files that a name or a pattern stands for, each of a kind that can be read."""
    found = [name] if os.path.isfile(name) else sorted(f for f in glob.glob(name, recursive=True) if os.path.isfile(f))
    for file in found:
        suffix = Path(file).suffix.lower()
        if suffix not in READERS:
            raise PosencError(f"{file} is none of {', '.join(READERS)}: convert it, or name other files.")
    return found


def refuse_path(name: str) -> None:
    """Raise for what was meant as a file and is none, before a hub is asked for it."""
    looks = any(sign in name for sign in "*?[") or Path(name).suffix.lower() in READERS or name.startswith((".", "/"))
    if looks or name.count("/") > 1:
        raise PosencError(f"No file matches {name!r}. Name files, a dataset (owner/name), or stdlib.")


def from_files(files: Iterable[str], column: str) -> Iterator[str]:
    """A text file is one document; of the others, each line or record is."""
    for file in files:
        kind = READERS[Path(file).suffix.lower()]
        if kind == "text":
            try:
                yield Path(file).read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise PosencError(f"{file} is not text in UTF-8: {error}. Convert it first.") from None
        else:
            import datasets  # takes seconds, and few need it

            yield from texts_of(loaded(datasets.load_dataset, kind, data_files=file, split="train"), column, file)


def from_hub(asked: DataSettings, streamed: bool) -> Iterator[str]:
    import datasets

    found = loaded(datasets.load_dataset, asked.path, asked.name, split=asked.split, streaming=streamed)
    return texts_of(found, asked.column, str(asked.path))


def is_large(asked: DataSettings) -> bool:
    """What the dataset says of its size; one that says nothing is streamed."""
    import datasets

    splits = loaded(datasets.load_dataset_builder, asked.path, asked.name).info.splits or {}
    return asked.split not in splits or splits[asked.split].num_bytes > LARGE


def loaded(load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return load(*args, **{"streaming": True, **kwargs} if "data_files" in kwargs else kwargs)
    except Exception as error:  # whatever the hub, a parser or the network says
        what = kwargs.get("data_files", args[0])
        raise PosencError(f"{what} cannot be read as a dataset: {type(error).__name__}: {error}") from error


def texts_of(records: Iterable[dict[str, Any]], column: str, name: str) -> Iterator[str]:
    """The texts in a column, checked record by record."""
    try:
        for record in records:
            if column not in record:
                raise PosencError(f"{name} has no column {column!r} (data.column).{suggestion(column, list(record))}")
            if not isinstance(record[column], str):
                raise PosencError(f"The column {column!r} of {name} holds {type(record[column]).__name__}, not text.")
            yield record[column]
    except PosencError:
        raise
    except Exception as error:  # a parser, at a damaged record
        raise PosencError(f"{name} cannot be read: {type(error).__name__}: {error}") from error
