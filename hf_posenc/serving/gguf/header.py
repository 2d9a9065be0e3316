"""What a GGUF file says of itself, read without its weights and without trust: any bytes may come.

Every count and length is held against the size of the file before anything is read or made of it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from ...errors import PosencError

MAGIC = b"GGUF"
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Types of values, as GGUF numbers them, in the letters of `struct`."""
STRING, ARRAY = 8, 9
TYPES = {0: "F32", 1: "F16", 8: "Q8_0", 30: "BF16"}
"""Types of tensors that are known here by name; others are quantized further."""
ROUGHEST_FIRST = ("Q8_0", "BF16", "F16", "F32")
MOST = 1 << 16
"""Numbers in a vector that is read."""
FEW = 64
"""Arrays up to this long are kept; of longer ones only the length, unless they are asked for."""


@dataclass
class Header:
    """Keys and tensors of a GGUF file."""

    keys: dict[str, Any] = field(default_factory=dict)
    """Arrays as tuples; a long one that was not asked for as None."""
    tensors: dict[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)
    """Shape and type by name."""
    places: dict[str, int] = field(default_factory=dict)
    """Where each tensor begins in the file."""

    @property
    def architecture(self) -> str:
        return str(self.keys.get("general.architecture", ""))

    def get(self, key: str) -> Any:
        """The value of a key that begins with the architecture's name."""
        return self.keys.get(f"{self.architecture}.{key}")

    @property
    def dtype(self) -> str:
        """The roughest type that a matrix is stored as."""
        types = {kind for shape, kind in self.tensors.values() if len(shape) > 1}
        if not types <= set(ROUGHEST_FIRST):
            return "quantized"
        return next((kind.lower() for kind in ROUGHEST_FIRST if kind in types), "f32")


def read_header(path: Path, wanted: Collection[str] = ()) -> Header:
    """`wanted`: long arrays to keep."""
    with open(path, "rb") as file:
        try:
            return _Reader(file, os.fstat(file.fileno()).st_size).header(wanted)
        except (struct.error, UnicodeDecodeError, ValueError) as error:
            raise PosencError(f"{path} is not a GGUF file, or damaged: {error}.") from None


def read_floats(path: Path, header: Header, name: str) -> tuple[float, ...]:
    """The numbers of a short vector in fp32; empty where there is none of that name."""
    shape, kind = header.tensors.get(name, ((), ""))
    if kind != "F32" or len(shape) != 1 or shape[0] > MOST:
        return ()
    with open(path, "rb") as file:
        reader = _Reader(file, os.fstat(file.fileno()).st_size)
        file.seek(min(header.places[name], reader.size))
        try:
            return struct.unpack(f"<{shape[0]}f", reader.take(4 * shape[0]))
        except ValueError:
            return ()


class _Reader:
    """A cursor over untrusted bytes."""

    def __init__(self, file: IO[bytes], size: int):
        self.file, self.size = file, size

    def take(self, count: int) -> bytes:
        if count < 0 or count > self.size - self.file.tell():
            raise ValueError(f"it speaks of {count} bytes more than it has")
        return self.file.read(count)

    def number(self, letter: str) -> Any:
        return struct.unpack(f"<{letter}", self.take(struct.calcsize(f"<{letter}")))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", errors="replace")

    def header(self, wanted: Collection[str]) -> Header:
        if self.take(4) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self.number("I")
        if version not in (2, 3):
            raise ValueError(f"it is of version {version}, and 2 and 3 are read")
        tensors, keys = self.number("Q"), self.number("Q")
        found = Header()
        for _ in range(self.count(keys, 13)):  # a key, its type and a value: 13 bytes at least
            key = self.text()
            found.keys[key] = self.value(self.number("I"), key in wanted)
        for _ in range(self.count(tensors, 24)):
            name, axes = self.text(), self.number("I")
            shape = tuple(self.number("Q") for _ in range(self.count(axes, 8)))
            found.tensors[name] = (shape, self.kind())
            found.places[name] = self.number("Q")
        step = found.keys.get("general.alignment", 32)
        begin = -(-self.file.tell() // step) * step if isinstance(step, int) and step > 0 else self.file.tell()
        found.places = {name: begin + place for name, place in found.places.items()}
        return found

    def kind(self) -> str:
        number = self.number("I")
        return TYPES.get(number, f"type {number}")

    def count(self, count: int, least: int) -> int:
        """A number of things, of which each takes at least so many bytes."""
        if count * least > self.size - self.file.tell():
            raise ValueError(f"it speaks of {count} entries, for which it is too short")
        return count

    def value(self, kind: int, wanted: bool) -> Any:
        if kind in NUMBERS:
            return self.number(NUMBERS[kind])
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            raise ValueError(f"it has a value of type {kind}, which there is not")
        inner, count = self.number("I"), self.number("Q")
        kept = wanted or count <= FEW
        if inner in NUMBERS:
            raw = self.take(self.count(count, 1) * struct.calcsize(f"<{NUMBERS[inner]}"))
            return struct.unpack(f"<{count}{NUMBERS[inner]}", raw) if kept else None
        if inner != STRING:
            raise ValueError(f"it has an array of type {inner}, which is not read here")
        texts = (self.text() for _ in range(self.count(count, 8)))
        if kept:
            return tuple(texts)
        for _ in texts:
            pass
        return None
