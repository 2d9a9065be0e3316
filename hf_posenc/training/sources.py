"""The text of a recipe: from the Python installation, files, or a dataset; and its held-out part."""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from ..errors import PosencError, suggestion
from ..evaluation.measures.text_files import read_text
from .settings import DataSettings, Source
from .stdlib import stdlib_texts

LARGE = 2**28
"""Bytes of text from which it is read while training."""
MANY = 20
"""With fewer documents than this, the end of each one is held out instead of whole documents."""
READERS = {".txt": "text", ".md": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
TEXTS = tuple(suffix for suffix, kind in READERS.items() if kind == "text")
HELD_OUT = 0.05
"""The default share of held-out text."""
AHEAD = 20_000
"""Held-out documents of a stream are chosen among the first so many."""


Example = str | tuple[str, str] | list[dict[str, Any]]
"""A text, a prompt with its completion, or the messages of a chat."""


@dataclass(frozen=True)
class Corpus:
    """Text to train on, and held-out text."""

    name: str
    documents: Callable[[], Iterator[Any]]
    """Starts a new pass over the training examples, in order."""
    held_out: list[Any]
    streamed: bool = False
    format: str = "text"
    drops: bool = False
    """Whether examples longer than a row are dropped; otherwise they are refused."""


def load_corpora(asked: DataSettings) -> list[tuple[Corpus, float]]:
    """All sources of a recipe, with their weights."""
    found = [(load_corpus(source, asked.held_out), source) for source in asked.all_sources]
    return [(replace(text, drops=source.too_long == "drop"), source.weight) for text, source in found]


def load_corpus(asked: Source, share: float = HELD_OUT) -> Corpus:
    """The examples of a source, with a share held out."""
    if asked.path == "stdlib":
        if asked.format != "text":
            raise PosencError(f"stdlib is plain text, not data.format: {asked.format}.")
        return Corpus("stdlib", lambda: iter(stdlib_texts().values()), list(stdlib_texts(held_out=True).values()))
    files = source_files(asked)
    if files:
        name = asked.path if isinstance(asked.path, str) else ", ".join(asked.path)
        size = sum(os.path.getsize(file) for file in files)
        streamed = size > LARGE if asked.streaming is None else asked.streaming
        return split(name, lambda: from_files(files, asked), share, streamed, asked.format)
    assert isinstance(asked.path, str)  # the name of a dataset
    streamed = is_large(asked) if asked.streaming is None else asked.streaming
    return split(asked.path, lambda: from_hub(asked, streamed), share, streamed, asked.format)


def refuse_missing_files(asked: DataSettings) -> None:
    """Raise for files that are not there or cannot be read, before anything slow is done."""
    for source in asked.all_sources:
        source_files(source)


def source_files(asked: Source) -> list[str]:
    """The files of a source; none if it is a dataset of the hub, or the standard library."""
    if asked.path == "stdlib":
        return []
    names = [asked.path] if isinstance(asked.path, str) else asked.path
    files = [file for name in names for file in matching_files(name)]
    if files:
        return files
    if isinstance(asked.path, list):
        raise PosencError(f"None of these files exists: {', '.join(names)}.")
    refuse_path(asked.path)
    refuse_folder_of_texts(asked.path)
    return []


def split(
    name: str, documents: Callable[[], Iterator[Any]], share: float, streamed: bool, format: str = "text"
) -> Corpus:
    """Hold out a share: whole examples, chosen by hash, or the end of each if there are few documents."""
    if streamed:
        kept = [text for text in islice(documents(), AHEAD) if is_held_out(text, share)]
        return Corpus(
            name, lambda: (t for t in documents() if not is_held_out(t, share)), kept, streamed=True, format=format
        )
    texts = [text for text in documents() if not isinstance(text, str) or text.strip()]
    if not texts:
        raise PosencError(f"{name} holds no text.")
    if len(texts) >= MANY:
        kept = [text for text in texts if is_held_out(text, share)]
        if kept:
            trained = [text for text in texts if not is_held_out(text, share)]
            return Corpus(name, lambda: iter(trained), kept, format=format)
    if format != "text":
        if len(texts) < 2:
            raise PosencError(f"{name} holds one example: one to train on and one to hold out are needed.")
        last = max(1, round(share * len(texts)))
        return Corpus(name, lambda: iter(texts[:-last]), texts[-last:], format=format)
    ends = [int(len(text) * (1 - share)) for text in texts]
    parts = [text[:end] for text, end in zip(texts, ends, strict=True)]
    return Corpus(name, lambda: iter(parts), [text[end:] for text, end in zip(texts, ends, strict=True)])


def is_held_out(example: Example, share: float) -> bool:
    said = example if isinstance(example, str) else json.dumps(example, sort_keys=True)
    return int.from_bytes(hashlib.sha256(said.encode(errors="replace")).digest()[:4], "big") < share * 2**32


def matching_files(name: str) -> list[str]:
    """The files of a name or a pattern, which must be of a readable type."""
    found = [name] if os.path.isfile(name) else sorted(f for f in glob.glob(name, recursive=True) if os.path.isfile(f))
    for file in found:
        suffix = Path(file).suffix.lower()
        if suffix not in READERS:
            raise PosencError(f"{file} is not one of {', '.join(READERS)}: convert it, or name other files.")
    return found


def refuse_path(name: str) -> None:
    """Raise for a missing file, so that the hub is not asked for it."""
    looks = any(sign in name for sign in "*?[") or Path(name).suffix.lower() in READERS or name.startswith((".", "/"))
    if looks or name.count("/") > 1:
        raise PosencError(f"No file matches {name!r}. Name files, a dataset (owner/name), or stdlib.")


def refuse_folder_of_texts(name: str) -> None:
    """Raise for a folder of text files: `datasets` would make a document of each line."""
    found = (
        next((suffix for suffix in TEXTS if any(Path(name).rglob(f"*{suffix}"))), None)
        if Path(name).is_dir()
        else None
    )
    if found is not None:
        raise PosencError(f"{name} is a folder. Name the files in it: '{name.rstrip('/')}/*{found}'.")


def from_files(files: Iterable[str], asked: Source) -> Iterator[Any]:
    """Examples of files: a text file is one document, other files have one for each line or record."""
    for file in files:
        kind = READERS[Path(file).suffix.lower()]
        if kind == "text":
            if asked.format != "text":
                raise PosencError(f"{file} is text, and data.format: {asked.format} is read from records (.jsonl).")
            yield read_text(Path(file))
        else:
            import datasets  # slow to import

            yield from examples_of(
                read_dataset(datasets.load_dataset, kind, data_files=file, split="train"), asked, file
            )


def from_hub(asked: Source, streamed: bool) -> Iterator[Any]:
    import datasets

    found = read_dataset(datasets.load_dataset, asked.path, asked.name, split=asked.split, streaming=streamed)
    return examples_of(found, asked, str(asked.path))


def is_large(asked: Source) -> bool:
    """Whether a dataset is large, by its metadata; one of unknown size counts as large."""
    import datasets

    splits = read_dataset(datasets.load_dataset_builder, asked.path, asked.name).info.splits or {}
    return asked.split not in splits or splits[asked.split].num_bytes > LARGE


def read_dataset(load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return load(*args, **{"streaming": True, **kwargs} if "data_files" in kwargs else kwargs)
    except Exception as error:  # from the hub, a parser or the network
        what = kwargs.get("data_files", args[0])
        raise PosencError(f"{what} cannot be read as a dataset: {type(error).__name__}: {error}") from error


def examples_of(records: Iterable[dict[str, Any]], asked: Source, name: str) -> Iterator[Any]:
    """The examples of records, by the format of the source."""
    make = {"text": text_of, "prompt_completion": prompt_of, "chat": chat_of}[asked.format]
    try:
        for record in records:
            yield make(record, asked, name)
    except PosencError:
        raise
    except Exception as error:  # a parser fails at a damaged record
        raise PosencError(f"{name} cannot be read: {type(error).__name__}: {error}") from error


def text_of(record: dict[str, Any], asked: Source, name: str) -> str:
    return _string(record, asked.column, "data.column", name)


def prompt_of(record: dict[str, Any], asked: Source, name: str) -> tuple[str, str]:
    prompt = _string(record, asked.prompt, "data.prompt", name)
    return prompt, _string(record, asked.completion, "data.completion", name)


def chat_of(record: dict[str, Any], asked: Source, name: str) -> list[dict[str, Any]]:
    messages = _cell(record, asked.messages, "data.messages", name)
    fits = isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)
    if not fits or any(not isinstance(m.get(key), str) for m in messages for key in ("role", "content")):
        raise PosencError(
            f"The column {asked.messages!r} of {name} should hold lists of {{role, content}}, but one is "
            f"{str(messages)[:80]!r}."
        )
    if not any(message["role"] == "assistant" for message in messages):
        raise PosencError(f"A chat of {name} has no turn of the assistant, so there is nothing to train on.")
    return messages


def _cell(record: dict[str, Any], column: str, key: str, name: str) -> Any:
    if column not in record:
        raise PosencError(f"{name} has no column {column!r} ({key}).{suggestion(column, list(record))}")
    return record[column]


def _string(record: dict[str, Any], column: str, key: str, name: str) -> str:
    found = _cell(record, column, key, name)
    if not isinstance(found, str):
        raise PosencError(f"The column {column!r} of {name} holds {type(found).__name__}, not text.")
    return found
