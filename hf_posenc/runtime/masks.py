"""Masks in the form that kernels need, and facts about a mask (`Sight`) on which shortcuts depend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compat.pytorch import assert_later, changes_of
from ..errors import PosencError
from .attention_call import Call

BLOCK = 512
"""How many queries of a mask are looked at together, to limit memory."""
NOTE = "posenc_sight"
"""The attribute by which a mask carries the facts found about it, for the other layers of a pass."""
RUNS = "posenc_runs"
"""The same, for `Runs`."""
PADDING = "posenc_padding"
"""The attribute by which a mask carries which tokens are padding, if it was made from that."""


GAPS = (
    "The attention mask hides tokens that are no padding (packed texts, a tree of drafts, tokens seen before), and "
    "this scheme's cache, which drops tokens, cannot heed that. Use no cache (use_cache=False), or another scheme."
)


class Sight(NamedTuple):
    """Facts that hold for all pairs of a query and a key that the mask shows."""

    behind: bool
    """The position of the key is at most that of the query."""
    earlier: bool
    """The key does not come after the query, by slots. With a static cache, where only the device knows the slot of a
    query, by positions."""
    gapless: bool
    """The distance in positions equals the distance in slots."""


UNKNOWN = Sight(False, False, False)


class Note(NamedTuple):
    """The facts found about a mask, and the positions for which they hold. A mask may be used again with others."""

    version: int
    query: Tensor
    key: Tensor
    first: int | None
    sight: Sight

    def fits(self, mask: Tensor, query: Tensor, key: Tensor, first: int | None) -> bool:
        same = self.version == changes_of(mask) and self.first == first
        return same and torch.equal(self.query, query) and torch.equal(self.key, key)


def sight(mask: Tensor | None, causal: bool, call: Call, keys: int) -> Sight:
    """The facts about an attention call. `causal`: there is no mask, and query i sees keys 0..i."""
    if torch.compiler.is_compiling():  # a compiled graph cannot look at values
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
    if not mask.is_inference():  # inference tensors do not count their changes
        setattr(mask, NOTE, Note(changes_of(mask), query.clone(), key.clone(), first, found))
    return found


def _examine(mask: Tensor, query: Tensor, key: Tensor, first: int | None, rising: bool, gapless: bool) -> Sight:
    """Find the facts about a mask, some queries at a time. Positions are compared only where slots do not decide."""
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
    """Wrap a mask function of transformers so that its masks carry which tokens are padding (`padding_of`)."""

    def with_padding(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
        mask = make(*args, attention_mask=attention_mask, **kwargs)
        if mask is not None and attention_mask is not None and not torch.compiler.is_compiling():
            setattr(mask, PADDING, attention_mask == 0)
        return mask

    return with_padding


def padding_of(mask: Tensor) -> Tensor | None:
    """Which tokens are padding, (batch, keys); None if the mask does not carry it."""
    return getattr(mask, PADDING, None)


def ordered_queries(query: Tensor) -> Tensor:
    """Which queries have a position of at least those of all earlier queries. Padding within a text may not."""
    if torch.compiler.is_exporting():  # ONNX has no running maximum, and a mask is as large as this
        return ~(query[:, None, :] > query[:, :, None]).tril().any(-1)
    return query >= query.cummax(-1).values


def _sees_later(mask: Tensor, first: int) -> bool:
    """Whether any query, the first of which is in slot `first`, sees a later slot than its own."""
    last = first + mask.shape[2]
    return bool(boolean_mask(mask[..., last:]).any()) or bool(boolean_mask(mask[..., first:last]).triu(1).any())


class Runs(NamedTuple):
    """What a mask says of whole texts, and for which of its versions."""

    version: int
    real: Tensor
    """Which keys any query sees, (batch or 1, heads or 1, keys)."""
    whole: Tensor
    """Whether each query sees these from a first one to a last one without a gap."""


def runs(mask: Tensor) -> Runs:
    """Found once for all layers of a pass."""
    if torch.compiler.is_compiling():  # a graph for any length has no fixed number of blocks, and no notes
        seen = boolean_mask(mask)
        real = seen.any(2)
        return Runs(-1, real, _without_gaps(seen, real.cumsum(-1)[:, :, None]))
    noted: Runs | None = getattr(mask, RUNS, None)
    if noted is not None and noted.version == changes_of(mask):
        return noted
    parts = [boolean_mask(mask[:, :, start : start + BLOCK]) for start in range(0, mask.shape[2], BLOCK)]
    real = torch.stack([part.any(2) for part in parts]).any(0)
    order = real.cumsum(-1)[:, :, None]
    whole = torch.stack([_without_gaps(part, order) for part in parts]).all()
    if mask.is_inference():  # inference tensors do not count their changes
        return Runs(-1, real, whole)
    found = Runs(changes_of(mask), real, whole)
    setattr(mask, RUNS, found)
    return found


def _without_gaps(seen: Tensor, order: Tensor) -> Tensor:
    """Whether each query sees as many keys as there are from its first to its last. `order` numbers the keys."""
    last = torch.where(seen, order, 0).amax(-1)
    first = torch.where(seen, order, order.shape[-1] + 1).amin(-1)
    count = seen.sum(-1)
    return ((count == 0) | (count == last - first + 1)).all()


def refuse_gaps(mask: Tensor, new: int, kept: Tensor, slots: Tensor) -> None:
    """Raise unless each of the `new` queries sees all tokens before it but padding, as a cache that drops tokens takes
    for granted.

    `kept`: which of the tokens that the cache holds are no padding, (batch, keys); `slots`: how many tokens before the
    first of the new ones they were.
    """
    seen = boolean_mask(mask)[:, 0]
    real = seen[:, -1, -new:]
    meant = real[:, None] & torch.ones(new, new, dtype=torch.bool, device=mask.device).tril()
    column = seen.shape[2] - new - slots
    found = seen.expand(len(kept), -1, -1).gather(2, column.clamp(min=0)[:, None].expand(-1, new, -1))
    right = (seen[:, :, -new:] == meant).all(-1) & ((found == kept[:, None]) | (column < 0)[:, None]).all(-1)
    own = seen[:, :, -new:].diagonal(dim1=1, dim2=2)  # padding sees not even itself, and its outputs are not used
    holds = (right | ~own).all()
    if mask.dtype != torch.bool:  # nor may the mask add anything
        holds = holds & (boolean_mask(mask) == (mask == 0)).all()
    if torch.compiler.is_compiling():
        assert_later(holds, GAPS)
    elif not bool(holds):
        raise PosencError(GAPS)


def boolean_mask(mask: Tensor) -> Tensor:
    """A boolean or additive mask as a boolean one: what is seen. A moderately negative number is seen, as a bias."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def add_mask(bias: Tensor, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Bias and mask as one additive mask, in the precision of the bias."""
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        # Not -inf, which would give NaN in rows of padding that see nothing.
        return torch.where(mask, bias, torch.finfo(dtype).min)
    return (bias + mask).clamp(min=torch.finfo(dtype).min)


def mask_rows(
    mask: Tensor | None, start: int, end: int, keys: int, causal: bool, device: torch.device
) -> Tensor | None:
    """The mask of queries start..end. Without a mask, query i of a causal layer sees keys 0..i."""
    if mask is not None:
        return mask[:, :, start:end, :keys]
    if not causal:
        return None
    rows, columns = torch.arange(start, end, device=device), torch.arange(keys, device=device)
    return (columns <= rows[:, None])[None, None]
