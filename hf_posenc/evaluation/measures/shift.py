"""The loss of a passage at growing positions: constant if positions are sound, rising if they are not.

The passage follows an unrelated text after a gap in the positions, where no tokens are. Only the distance changes, so
a rising loss is caused by the positions alone; and a pass at 128k is as cheap as one at 1k.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from ...errors import PosencError
from ...patching.patch_state import unwrap_model
from .estimates import mean_and_error
from .losses import Pass, is_cacheable, refuse_broken
from .perplexity import Progress, Reading, chunks, rows_together
from .processes import ALONE, Processes
from .rows import Row
from .texts import Document, spread_windows

BEFORE = 128
"""Tokens of the unrelated text, if the shortest length has room for them."""
LEAST = 16
HOW = "the same passages after an unrelated text and a gap in the positions that ends at the length"


def shift(
    model: Any,
    documents: Sequence[Document],
    lengths: Sequence[int],
    *,
    reading: Reading | None = None,
    bos: int | None = None,
    scheme: str = "unpatched",
    progress: Progress | None = None,
    shared: Processes = ALONE,
) -> list[Row]:
    """The loss of passages that end at each length, and its increase from the shortest length on."""
    refuse_unshiftable(model)
    reading, ends = reading or Reading(), sorted(set(lengths))
    before, passages = cut_passages(documents, ends[0], reading, bos)

    def read(batch: list[int]) -> Tensor:
        found = torch.stack([shift_losses(model, before[batch], passages[batch], end) for end in ends], 1)
        if progress is not None:
            progress(len(batch) * len(ends) * (before.shape[1] + passages.shape[1]) * shared.count)
        return found

    together = reading.batch_size or rows_together(before.shape[1] + passages.shape[1], model.device.type)
    cut = list(chunks(list(range(len(passages))), together))
    losses = torch.cat(shared.each(cut, read)).double()  # passage, length
    details: dict[str, Any] = {
        "how": HOW,
        "windows": len(passages),
        "tokens": len(passages) * (passages.shape[1] - 1),
        "before": before.shape[1],
        "scored": passages.shape[1] - 1,
        "documents": [document.name for document in documents],
        "bos": bos is not None,
    }
    rows = []
    for column, end in enumerate(ends):
        own, climbed = losses[:, column].tolist(), (losses[:, column] - losses[:, 0]).tolist()
        for metric, values in (("loss", own), ("climb", climbed)):
            value, error = mean_and_error(values)
            row = Row(
                task="shift", protocol="gap", scheme=scheme, length=end, metric=metric, value=value, stderr=error,
                n=len(values), details={**details, "losses": values} if metric == "loss" else details,
            )  # fmt: skip
            if metric == "loss" or column:
                rows.append(row)
    return rows


@torch.no_grad()
def shift_losses(model: Any, before: Tensor, passages: Tensor, end: int) -> Tensor:
    """The mean loss of each passage without its first token, with its last token at position `end` - 1."""
    cache = DynamicCache()
    Pass(model, before, 0, cache).logits(slice(0, 1))
    size = passages.shape[1]
    logits = Pass(model, passages, end - size, cache).logits(slice(0, size - 1)).float()
    targets = passages[:, 1:].to(logits.device)
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape).cpu()
    refuse_broken(losses, end - size + 1)
    return losses.mean(-1)


def cut_passages(
    documents: Sequence[Document], shortest: int, reading: Reading, bos: int | None
) -> tuple[Tensor, Tensor]:
    """Passages, and the unrelated text before each, which starts with `bos` if there is one."""
    size = reading.scored + 1
    room = min(BEFORE, shortest - size)
    if room < LEAST:
        raise PosencError(
            f"shift reads {size} tokens after at least {LEAST} others, and {shortest} tokens have no room for them: "
            f"take lengths from {size + LEAST} up, or score fewer."
        )
    windows = spread_windows(documents, room + size, room + size, size, reading.windows)
    if len(windows) < 2:
        raise PosencError("shift takes the text before a passage from another window: read two windows or more.")
    rows = torch.stack([documents[w.document].ids[w.start : w.end] for w in windows])
    before = rows[:, :room].roll(len(rows) // 2, 0)
    if bos is not None:
        before = torch.cat([torch.full((len(rows), 1), bos), before[:, 1:]], 1)
    return before, rows[:, room:]


def refuse_unshiftable(model: Any) -> None:
    """Raise for models that take no position ids from outside."""
    inner = unwrap_model(model)
    taken = inspect.signature(inner.forward).parameters
    if not is_cacheable(model) or "position_ids" not in taken:
        raise PosencError(
            f"{type(inner).__name__} does not take position ids together with a cache, which shift needs. Measure "
            "--tasks perplexity by the protocol `last` instead."
        )
