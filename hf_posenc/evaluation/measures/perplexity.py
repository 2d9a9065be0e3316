"""Perplexity by four protocols, and the loss by position."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import Tensor

from ...errors import PosencError, suggestion
from .estimates import mean_and_error
from .losses import CHUNK, token_losses
from .processes import ALONE, Processes
from .rows import Row
from .texts import Document, Window, refuse_short, spread_windows, window_ids

Progress = Callable[[int], object]
"""Called with the number of tokens read."""
TOGETHER = {"cpu": 2048}
"""Tokens in a batch by default: on a CPU, more gain nothing."""
BINS = 32


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How text is cut into windows and read."""

    windows: int | None = None
    """Number of windows, for `last` and the loss by position. Default: 20, or as many as the text has room for."""
    scored: int = 64
    """Scored tokens at the end of each window of `last`."""
    stride: int = 256
    max_tokens: int | None = None
    """Tokens read of each document, for `sliding` and `yarn`; all by default."""
    truncate: bool = False
    """For `yarn`: read one window of each document, as in the paper's figures for Proof-pile."""
    batch_size: int | None = None
    chunk: int = CHUNK
    step: int | None = None
    """Read so many tokens at a time with a KV cache."""

    def __post_init__(self) -> None:
        for name in ("windows", "scored", "stride", "max_tokens", "batch_size", "chunk", "step"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise PosencError(f"{name} must be a whole number from 1 up, got {value!r}.")


def last_windows(documents: Sequence[Document], length: int, longest: int, reading: Reading) -> list[Window]:
    return spread_windows(documents, length, longest, reading.scored, reading.windows)


def sliding_windows(documents: Sequence[Document], length: int, longest: int, reading: Reading) -> list[Window]:
    """Windows that move by the stride. Each token is scored once, in the first window that holds it."""
    if reading.stride > length:
        raise PosencError(f"A stride of {reading.stride} skips tokens between windows of {length}: use a smaller one.")
    needed = reading.max_tokens or longest
    refuse_short(documents, needed, f"sliding windows of {longest} tokens over {needed}")
    if reading.max_tokens is not None and reading.max_tokens < length:
        raise PosencError(f"{reading.max_tokens} tokens of text are less than a window of {length}: read more.")
    found = []
    for index, document in enumerate(documents):
        size, done = reading.max_tokens or len(document.ids), 0
        for start in range(0, size, reading.stride):
            end = min(start + length, size)
            found.append(Window(index, start, end, end - done))
            done = end
            if end == size:
                break
    return found


def whole_windows(documents: Sequence[Document], length: int, longest: int, reading: Reading) -> list[Window]:
    refuse_short(documents, longest, f"a pass over {longest} tokens")
    return [Window(index, 0, length, length) for index in range(len(documents))]


def yarn_windows(documents: Sequence[Document], length: int, longest: int, reading: Reading) -> list[Window]:
    if reading.truncate:
        return whole_windows(documents, length, longest, reading)
    return sliding_windows(documents, length, longest, reading)


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """How perplexity is computed: which windows, and how they are averaged."""

    windows: Callable[[Sequence[Document], int, int, Reading], list[Window]]
    summary: str
    weighted: bool = True
    """Whether the mean is over tokens; else over windows."""
    opens: bool = False
    """Whether windows always start with BOS, whatever the tokenizer does."""
    takes: tuple[str, ...] = ()
    """The settings that it uses, of those that only some protocols use."""


PROTOCOLS = {
    "last": Protocol(
        windows=last_windows,
        summary="the same last tokens scored while the context before them grows",
        takes=("windows", "scored"),
    ),
    "sliding": Protocol(
        windows=sliding_windows,
        summary="every token scored once, in windows that move on by the stride; mean over tokens",
        takes=("stride", "max_tokens"),
    ),
    "whole": Protocol(windows=whole_windows, summary="one pass over the first tokens of each document, all scored"),
    "yarn": Protocol(
        windows=yarn_windows,
        summary="the YaRN paper's script: BOS before each window, mean of the means of windows",
        weighted=False,
        opens=True,
        takes=("stride", "max_tokens", "truncate"),
    ),
}
PARTIAL = ("windows", "max_tokens", "truncate")
"""Settings that are refused if the protocol does not use them."""


def protocol_of(name: str, reading: Reading) -> Protocol:
    """The protocol of that name; raises for a setting that it does not use."""
    if name not in PROTOCOLS:
        raise PosencError(f"Unknown protocol {name!r}.{suggestion(name, list(PROTOCOLS))}")
    for setting in PARTIAL:
        if getattr(reading, setting) and setting not in PROTOCOLS[name].takes:
            heeding = ", ".join(p for p, protocol in PROTOCOLS.items() if setting in protocol.takes)
            raise PosencError(f"The protocol {name!r} does not use {setting}; {heeding} would. Leave it out.")
    return PROTOCOLS[name]


def cut_windows(
    name: str, documents: Sequence[Document], length: int, longest: int, reading: Reading, bos: int | None
) -> list[Window]:
    """The windows of a protocol. BOS is one of the `length` tokens; without it the first one is not scored."""
    protocol = protocol_of(name, reading)
    if protocol.opens and bos is None:
        raise PosencError(f"The protocol {name!r} starts each window with BOS, and this tokenizer has none.")
    opening = bos is not None
    windows = protocol.windows(documents, length - opening, longest - opening, reading)
    return [Window(w.document, w.start, w.end, min(w.scored, w.end - w.start - (not opening))) for w in windows]


def perplexity(
    model: Any,
    documents: Sequence[Document],
    length: int,
    *,
    protocol: str = "last",
    longest: int | None = None,
    reading: Reading | None = None,
    bos: int | None = None,
    scheme: str = "unpatched",
    progress: Progress | None = None,
    shared: Processes = ALONE,
) -> list[Row]:
    """The loss at a length, and its perplexity. `last` scores the same tokens at all lengths up to `longest`."""
    reading = reading or Reading()
    windows = [w for w in cut_windows(protocol, documents, length, longest or length, reading, bos) if w.scored]
    losses = window_losses(model, documents, windows, reading, bos, progress, shared)
    means = [float(loss.double().mean()) for loss in losses]
    weights = [float(len(loss)) if PROTOCOLS[protocol].weighted else 1.0 for loss in losses]
    value, error = mean_and_error(means, weights)
    details: dict[str, Any] = {
        "how": PROTOCOLS[protocol].summary,
        "windows": len(windows),
        "tokens": sum(len(loss) for loss in losses),
        "seeds": 0,
        "documents": [document.name for document in documents],
        "bos": bos is not None,
        **{name: getattr(reading, name) for name in PROTOCOLS[protocol].takes if name != "windows"},
    }
    common: dict[str, Any] = {
        "task": "perplexity", "protocol": protocol, "scheme": scheme, "length": length, "n": len(windows)
    }  # fmt: skip
    risen = math.exp(min(value, 700.0))
    return [
        Row(**common, metric="loss", value=value, stderr=error, details={**details, "losses": means}),
        Row(
            **common,
            metric="perplexity",
            value=risen,
            stderr=None if error is None else risen * error,
            details=details,
        ),
    ]


def loss_by_position(
    model: Any,
    documents: Sequence[Document],
    length: int,
    *,
    reading: Reading | None = None,
    bos: int | None = None,
    scheme: str = "unpatched",
    progress: Progress | None = None,
    shared: Processes = ALONE,
) -> list[Row]:
    """The loss by position within one pass over windows of `length`: a row for each of up to 32 stretches."""
    reading = reading or Reading()
    opening = bos is not None
    apart = min(reading.scored, length - opening - 1)
    cuts = spread_windows(documents, length - opening, length - opening, apart, reading.windows)
    windows = [Window(w.document, w.start, w.end, length - 1) for w in cuts]
    losses = window_losses(model, documents, windows, reading, bos, progress, shared)
    width = max(1, length // BINS)
    rows = []
    for start in range(1, length, width):
        end = min(start + width, length)  # positions of the tokens that are predicted, the first being 0
        means = [float(loss[start - 1 : end - 1].double().mean()) for loss in losses]
        value, error = mean_and_error(means)
        details = {
            "how": "one pass over each window, all tokens scored",
            "from": start,
            "to": end,
            "window": length,
            "windows": len(windows),
            "tokens": len(windows) * (end - start),
            "seeds": 0,
            "bos": opening,
        }
        row = Row(
            task="loss_by_position", protocol="whole", scheme=scheme, length=end, metric="loss", value=value,
            stderr=error, n=len(windows), details=details,
        )  # fmt: skip
        rows.append(row)
    return rows


def window_losses(
    model: Any,
    documents: Sequence[Document],
    windows: Sequence[Window],
    reading: Reading,
    bos: int | None,
    progress: Progress | None = None,
    shared: Processes = ALONE,
) -> list[Tensor]:
    """The losses of the scored tokens of each window. Windows of one shape go through the model together.

    Which ones go together does not depend on how many processes share them, and so neither does any digit.
    """

    def read(batch: list[int]) -> Tensor:
        chosen = [windows[i] for i in batch]
        ids = window_ids(documents, chosen, bos)
        found = token_losses(model, ids, last=chosen[0].scored, chunk=reading.chunk, step=reading.step)
        if progress is not None:
            progress(ids.numel() * shared.count)
        return found

    cut_up = list(batches(windows, reading.batch_size, model.device.type))
    losses: dict[int, Tensor] = {}
    for batch, found in zip(cut_up, shared.each(cut_up, read), strict=True):
        losses.update(zip(batch, found, strict=True))
    return [losses[i] for i in range(len(windows))]


def batches(windows: Sequence[Window], size: int | None, device: str) -> Iterator[list[int]]:
    """Indices of windows with equal lengths and scored tokens, so that nothing is padded."""

    def shape(index: int) -> tuple[int, int]:
        return windows[index].end - windows[index].start, windows[index].scored

    for (length, _), group in groupby(sorted(range(len(windows)), key=shape), key=shape):
        yield from chunks(list(group), size or rows_together(length, device))


def rows_together(length: int, device: str) -> int:
    return max(1, TOGETHER.get(device, 16384) // length)


def chunks(items: list[int], size: int) -> Iterable[list[int]]:
    return (items[i : i + size] for i in range(0, len(items), size))
