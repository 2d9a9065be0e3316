"""Text from files, folders and patterns, with helpful errors for all that cannot be read."""

from __future__ import annotations

import codecs
import glob
import os
from collections.abc import Iterable
from pathlib import Path

from ...errors import PosencError, suggestion

SUFFIXES = (".txt", ".md")
"""Files that are read in a folder. A file named directly may have any suffix."""
WIDE = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def read_texts(names: Iterable[str | os.PathLike[str]]) -> dict[str, str]:
    """Texts by the name of their file, or by its path if two files have the same name."""
    texts: dict[str, str] = {}
    for path in text_files(names):
        texts[path.name if path.name not in texts else str(path)] = read_text(path)
    if not texts:
        raise PosencError("No text was given. Name one or more text files with --text, for example --text book.txt.")
    return texts


def text_files(names: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """The files that names stand for, each once: files, folders, or patterns such as books/*.txt."""
    found = [path for name in names for path in _matching_files(os.fspath(name))]
    return list(dict.fromkeys(found))


def _matching_files(name: str) -> list[Path]:
    path = Path(name)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
        if not files:
            raise PosencError(
                f"The folder {name} holds no text files ({', '.join(SUFFIXES)}). Name files, or a pattern."
            )
        return files
    if path.exists():  # a pipe is no regular file, but can be read
        return [path]
    if glob.has_magic(name):
        files = sorted(Path(file) for file in glob.glob(name, recursive=True) if os.path.isfile(file))
        if not files:
            raise PosencError(f"No file matches {name!r}. Name text files, folders or patterns such as 'books/*.txt'.")
        return files
    raise PosencError(f"There is no text file {name!r}.{_hint(path)}")


def _hint(path: Path) -> str:
    """A hint on what was probably meant."""
    several = [part for part in str(path).split(",") if os.path.exists(part)]
    if len(several) > 1:
        return f" For more than one, repeat --text: {' '.join(f'--text {part}' for part in several)}."
    if not path.parent.is_dir():
        return f" There is no folder {str(path.parent)!r} either."
    near = [file.name for file in path.parent.iterdir() if file.suffix.lower() in SUFFIXES]
    return suggestion(path.name, near) if 0 < len(near) <= 20 else ""


def read_text(path: Path) -> str:
    """Read a text in UTF-8; an error says what the file holds instead."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PosencError(_encoding_message(path, error)) from None
    except OSError as error:
        raise PosencError(f"{path} cannot be read: {error.strerror}.") from None


def _encoding_message(path: Path, error: UnicodeDecodeError) -> str:
    data: bytes = error.object
    if data.startswith(WIDE):
        encoding, what = "UTF-16", "text in UTF-16"
    elif b"\0" in data:
        return f"{path} is no text: it holds binary data. Name a text file in UTF-8."
    else:
        encoding = "WINDOWS-1252"
        what = f"not text in UTF-8: byte 0x{data[error.start]:02x} at {error.start}; perhaps Latin-1 or {encoding}"
    return f"{path} is {what}. Convert it first: iconv -f {encoding} -t UTF-8 {path} > {path.stem}.utf8{path.suffix}"
