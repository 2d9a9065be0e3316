"""What a mask lets through: masks in the form that kernels want, and what shortcuts must know about them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compat.pytorch import changes_of
from .attention_call import Call

BLOCK = 512
"""Queries whose part of a mask is looked at together."""
NOTE = "posenc_sight"
"""Where a mask carries what was found about it, for the other layers of a pass."""
PADDING = "posenc_padding"
"""Where a mask that was made of which tokens are padding carries which they are."""


class Sight(NamedTuple):
    """What is true of all pairs of a query and a key that it sees."""

    behind: bool
    """No key's position is greater than its query's."""
    earlier: bool
    """No key came after its query: by slots; by positions under a static cache, where only the device knows slots."""
    gapless: bool
    """The distance of positions is that of slots."""


UNKNOWN = Sight(False, False, False)


class Note(NamedTuple):
    """What was found about a mask, and about which positions: a mask that is used again may be told others."""

    version: int
    query: Tensor
    key: Tensor
    first: int | None
    sight: Sight

    def fits(self, mask: Tensor, query: Tensor, key: Tensor, first: int | None) -> bool:
        same = self.version == changes_of(mask) and self.first == first
        return same and torch.equal(self.query, query) and torch.equal(self.key, key)


def sight(mask: Tensor | None, causal: bool, call: Call, keys: int) -> Sight:
    """What is seen in an attention call. `causal`: query i sees keys 0..i, there being no mask that says so."""
    if torch.compiler.is_compiling():  # which cannot look at numbers
        return UNKNOWN
    query, key, first = call.query, call.key(keys), 0 if causal else call.first_query
    steps = key.diff(dim=-1)
    gapless = bool((steps == 1).all())
    rising = gapless or bool((steps >= 0).all())
    gapless = gapless and first is not None
    if mask is None:
        return Sight(causal and rising, causal, gapless)
    if min(keys, mask.shape[3]) != key.shape[1]:
        return UNKNOWN
    noted: Note | None = getattr(mask, NOTE, None)
    if noted is not None and noted.fits(mask, query, key, first):
        return noted.sight
    found = _examine(mask[..., :keys], query, key, first, rising, gapless)
    if not mask.is_inference():  # such a mask does not say whether it was changed
        setattr(mask, NOTE, Note(changes_of(mask), query.clone(), key.clone(), first, found))
    return found


def _examine(mask: Tensor, query: Tensor, key: Tensor, first: int | None, rising: bool, gapless: bool) -> Sight:
    """Looks at a whole mask, some queries at a time; at positions only where slots do not tell."""
    length, slots = query.shape[1], torch.arange(key.shape[1], device=key.device)
    parts = [slice(start, min(start + BLOCK, length)) for start in range(0, length, BLOCK)]

    def none(hidden: Callable[[slice], Tensor]) -> bool:
        return not any(bool((boolean_mask(mask[:, :, part]) & hidden(part)[:, None]).any()) for part in parts)

    if first is None:
        ordered = ordered_queries(query)
        earlier = none(lambda part: ordered[:, part, None] & (key[:, None, :] > query[:, part, None]))
    else:
        earlier = not any(_sees_later(mask[:, :, part], first + part.start) for part in parts)
    behind = (first is not None and rising and earlier) or none(lambda part: key[:, None, :] > query[:, part, None])
    if first is not None and not gapless:
        shift, own = key - slots, query - slots[first : first + length]
        gapless = none(lambda part: shift[:, None, :] != own[:, part, None])
    return Sight(behind, earlier, gapless)


def keep_padding(make: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """A function of transformers that makes masks, whose masks tell which tokens are padding."""

    def made(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
        mask = make(*args, attention_mask=attention_mask, **kwargs)
        if mask is not None and attention_mask is not None and not torch.compiler.is_compiling():
            setattr(mask, PADDING, attention_mask == 0)
        return mask

    return made


def padding_of(mask: Tensor) -> Tensor | None:
    """Which tokens are padding, (batch, keys), of a mask that tells."""
    return getattr(mask, PADDING, None)


def ordered_queries(query: Tensor) -> Tensor:
    """Which queries do not stand before those that came before them, as padding within a text may."""
    return query >= query.cummax(-1).values


def _sees_later(mask: Tensor, first: int) -> bool:
    """Whether queries in slots from `first` on see one that is after their own."""
    last = first + mask.shape[2]
    return bool(boolean_mask(mask[..., last:]).any()) or bool(boolean_mask(mask[..., first:last]).triu(1).any())


def boolean_mask(mask: Tensor) -> Tensor:
    """What a mask of truth values or of numbers to add does not hide. A small number may still be seen."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def add_mask(bias: Tensor, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Bias and mask as one additive mask, in the precision of the bias."""
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        # Not -inf: a row of padding that sees nothing must not become NaN.
        return torch.where(mask, bias, torch.finfo(dtype).min)
    return (bias + mask).clamp(min=torch.finfo(dtype).min)


def mask_rows(
    mask: Tensor | None, start: int, end: int, keys: int, causal: bool, device: torch.device
) -> Tensor | None:
    """The mask of queries start..end. No mask on a causal layer means that query i sees keys 0..i."""
    if mask is not None:
        return mask[:, :, start:end, :keys]
    if not causal:
        return None
    rows, columns = torch.arange(start, end, device=device), torch.arange(keys, device=device)
    return (columns <= rows[:, None])[None, None]
