"""Plans of tiles (`tiles.py`) for patterns and stages, and the search for whole texts in the rows of a call.

Attention asks `plan_job` first; where it gives None, the call is computed in a slower way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..compat.pytorch import changes_of
from ..core.effects import FollowingRotation
from ..core.patterns import Banded, Chunked, Pattern, Scattered
from .attention_call import Angles
from .flash import fits
from .masks import boolean_mask, padding_of
from .positions import Positions
from .rotation import rotate
from .tiles import Job, Keys, Queries, Run, Span, Tile, band, beyond, blocks, causal_tiles

BLOCK = 512
"""How many queries of a mask are looked at together, to limit memory."""
NOTE = "posenc_texts"
"""The attribute by which a mask carries the texts found in it, for the other layers of a pass."""


def plan_job(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    at: Tensor,
    keys_at: Tensor,
    shared: Positions,
    scaling: float,
) -> Job | None:
    """The tiles of a causal call; None unless it has whole texts and a kernel that returns the log-sum-exp."""
    pattern, square = shared.pattern, query.shape[2] == key.shape[2] > 1
    if torch.compiler.is_compiling() or not square or not fits(query, value):
        return None
    if pattern is not None and not can_tile(pattern):
        return None
    found = find_texts(mask, at, len(query))
    alike = (keys_at == at) | (keys_at < 0)  # keys of padding may have no position
    if found is None or not bool(alike.all()):
        return None
    if (
        pattern is not None
        and not is_shift_free(pattern)
        and any(bool((_text_positions(at, t)[:, 0] != 0).any()) for t in found)
    ):
        return None
    return Job(
        found,
        lambda text: layout(shared, _text_positions(at, text)),
        lambda x, angles: rotate(x, angles, shared.layout),
        scaling,
    )


def _text_positions(at: Tensor, text: Span) -> Tensor:
    """The positions of a text, (batch or 1, tokens)."""
    return at[:, text.tokens] if len(at) == 1 else at[text.rows, text.tokens]


# --- tiles ---


def can_tile(pattern: Pattern) -> bool:
    """Whether a pattern can be divided into tiles."""
    if isinstance(pattern, Scattered):
        return pattern.causal and pattern.stride is None and not pattern.random_blocks
    return isinstance(pattern, (Banded, Chunked)) and pattern.causal


def is_shift_free(pattern: Pattern) -> bool:
    """Whether the tiles of a text do not depend on the position of its first token."""
    return isinstance(pattern, Banded) and (pattern.far is None or pattern.far.first is None)


def layout(shared: Positions, at: Tensor) -> Sequence[Keys]:
    """The tiles of one text with these positions, (batch or 1, tokens)."""
    if isinstance(shared.rotation, FollowingRotation):
        return _stage_layout(shared, shared.rotation, at)
    pattern = shared.pattern
    if isinstance(pattern, Chunked):
        return _chunk_layout(pattern, shared, at)
    assert isinstance(pattern, (Banded, Scattered))
    length, own = at.shape[1], _angles(shared, at)
    near = band(length, pattern.window)
    if isinstance(pattern, Scattered):
        near = near + beyond(length, pattern.window, pattern.global_tokens)
    whole = [Keys(own, length, [Queries(own, slice(0, length), near)])]
    if isinstance(pattern, Scattered) or pattern.far is None or length <= pattern.window:
        return whole
    window, far = pattern.window, pattern.far
    tiles = beyond(length, window, far.first)
    end = max(tile.key.start + tile.key.size for tile in tiles)
    queries, keys = _angles(shared, far.query(at[:, window:])), _angles(shared, far.key(at[:, :end]))
    return [*whole, Keys(keys, end, [Queries(queries, slice(window, length), tiles)])]


def _angles(shared: Positions, at: Tensor) -> Angles | None:
    return None if shared.rotation is None else shared.angles(at)


def _chunk_layout(pattern: Chunked, shared: Positions, at: Tensor) -> Sequence[Keys]:
    length, size = at.shape[1], pattern.chunk
    place = at % size
    own = _angles(shared, place)
    found = [Queries(own, slice(0, length), blocks(length, size))]
    whole, rest = divmod(length, size)
    if length > size:
        tiles = [Tile(Run(size, size, whole - 1, size), Run(0, size, whole - 1, size))] if whole > 1 else []
        if rest:
            tiles.append(Tile(Run(whole * size, rest), Run((whole - 1) * size, size)))
        after = (place[:, size:] + size).clamp(max=pattern.reach - 1)
        found.append(Queries(_angles(shared, after), slice(size, length), tiles))
    if length > 2 * size:
        starts = range(2 * size, length, size)
        tiles = [Tile(Run(start, min(size, length - start)), Run(0, start - size)) for start in starts]
        last = torch.full_like(at[:, 2 * size :], pattern.reach - 1)
        found.append(Queries(_angles(shared, last), slice(2 * size, length), tiles))
    return [Keys(own, length, found)]


def _stage_layout(shared: Positions, rotation: FollowingRotation, at: Tensor) -> Sequence[Keys]:
    """The tiles of one stage after the other, each with the keys rotated for that stage."""
    stages = rotation.stage(at[:1] + 1)[0]
    _, counts = stages.unique_consecutive(return_counts=True)
    found, start = [], 0
    for count in counts.tolist():
        end = start + count
        tiles = causal_tiles(start, end)
        if start:
            tiles.append(Tile(Run(start, count), Run(0, start)))
        cos, sin = shared.angles(at[:, :end], stages[start].expand(len(at)))
        queries = (cos[:, start:], sin[:, start:])
        found.append(Keys((cos, sin), end, [Queries(queries, slice(start, end), tiles)]))
        start = end
    return found


# --- texts ---


class _Note(NamedTuple):
    """The texts found in a mask, and the positions for which they hold. A mask may be used again with others."""

    version: int
    at: Tensor
    found: list[Span] | None


def find_texts(mask: Tensor | None, at: Tensor, batch: int) -> list[Span] | None:
    """The texts in the rows of a causal call without a cache, such as packed rows; None if the mask has another form.

    A text is a run of tokens whose positions rise by one, and in which each token sees those up to itself and nothing
    else.
    """
    if mask is None:
        if not bool((at.diff(dim=-1) == 1).all()):
            return None
        return _merge_rows([Span(slice(row, row + 1), slice(0, at.shape[1])) for row in range(batch)], at)
    noted: _Note | None = getattr(mask, NOTE, None)
    if noted is not None and noted.version == changes_of(mask) and torch.equal(noted.at, at):
        return noted.found
    found = _texts_of_mask(mask, at.expand(batch, -1))
    if not mask.is_inference():  # inference tensors do not count their changes
        setattr(mask, NOTE, _Note(changes_of(mask), at.clone(), found))
    return found


def _texts_of_mask(mask: Tensor, at: Tensor) -> list[Span] | None:
    if mask.shape[1] != 1 or mask.shape[2] != mask.shape[3] or mask.shape[2] != at.shape[1]:
        return None
    seen = mask if mask.dtype == torch.bool else mask == 0
    if seen is not mask and not torch.equal(seen, boolean_mask(mask)):  # the mask also carries a bias
        return None
    seen = seen[:, 0].expand(len(at), -1, -1)
    real = seen.diagonal(dim1=1, dim2=2)
    on = torch.zeros_like(real)
    on[:, 1:] = real[:, 1:] & real[:, :-1] & (at.diff(dim=-1) == 1)
    found = []
    for row in range(len(at)):
        starts = (real[row] & ~on[row]).nonzero()[:, 0].tolist()
        ends = (real[row] & ~torch.cat([on[row, 1:], on.new_zeros(1)])).nonzero()[:, 0].tolist()
        found += [Span(slice(row, row + 1), slice(s, e + 1)) for s, e in zip(starts, ends, strict=True)]
    if not _only_padding(seen, real, padding_of(mask)):
        return None
    if not all(_sees_only_itself(seen[span.rows.start], span.tokens) for span in found):
        return None
    return _merge_rows(found, at)


def _only_padding(seen: Tensor, real: Tensor, padding: Tensor | None) -> bool:
    """Whether tokens that do not see themselves are padding (whose outputs are not used) or see nothing."""
    if padding is not None and padding.shape == real.shape:
        real = real | padding
    return not any(bool(rows[~own].any()) for rows, own in zip(seen, real, strict=True))


def _merge_rows(found: list[Span], at: Tensor) -> list[Span]:
    """Merge rows into one span if each holds one text, in the same slots and at the same positions."""
    if [span.rows.start for span in found] != list(range(found[-1].rows.stop if found else 0)):
        return found
    if len({(span.tokens.start, span.tokens.stop) for span in found}) != 1 or bool((at[:, 0] != at[0, 0]).any()):
        return found
    return [Span(slice(0, len(found)), found[0].tokens)]


def _sees_only_itself(seen: Tensor, tokens: slice) -> bool:
    """Whether each token of a text sees the tokens of that text up to itself, and nothing else."""
    for start in range(tokens.start, tokens.stop, BLOCK):
        rows = seen[start : min(start + BLOCK, tokens.stop)]
        end = start + len(rows)
        if not bool(rows[:, tokens.start : start].all()) or bool(rows[:, : tokens.start].any()):
            return False
        if bool(rows[:, end:].any()) or not torch.equal(
            rows[:, start:end], torch.ones_like(rows[:, start:end]).tril()
        ):
            return False
    return True
