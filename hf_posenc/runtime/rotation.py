"""Rotates pairs of channels of queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor

from .attention_call import Angles

HALVES, NEIGHBOURS, LAST = "halves", "neighbours", "_last"
LAYOUTS = (HALVES, NEIGHBOURS, HALVES + LAST, NEIGHBOURS + LAST)
"""Which channels form a pair: i and i + d/2, or 2i and 2i + 1; and whether they are the first or last of a head."""


def rotate(x: Tensor, angles: Angles, layout: str = HALVES) -> Tensor:
    """Rotate pairs of channels of each head. The remaining channels are unchanged."""
    cos, sin = (a[:, None].to(x.dtype) for a in angles)
    if layout != HALVES:
        return _rotate_elsewhere(x, cos, sin, layout)
    pairs = cos.shape[-1]
    first, second, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)
    rotated = torch.empty_like(x)  # few passes over memory, as this may be done to many keys
    main, swapped = rotated[..., : 2 * pairs], torch.empty_like(x[..., : 2 * pairs])
    torch.mul(x[..., : 2 * pairs], torch.cat((cos, cos), -1), out=main)
    torch.mul(second, -sin, out=swapped[..., :pairs])
    torch.mul(first, sin, out=swapped[..., pairs:])
    main.add_(swapped)
    if rest.shape[-1]:
        rotated[..., 2 * pairs :] = rest
    return rotated


def _rotate_elsewhere(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """`rotate` for layouts in which pairs are neighbours or the rotated channels are the last of a head."""
    size = 2 * cos.shape[-1]
    start = x.shape[-1] - size if layout.endswith(LAST) else 0
    part = x[..., start : start + size]
    halves = layout.startswith(HALVES)
    first, second = part.chunk(2, -1) if halves else (part[..., 0::2], part[..., 1::2])
    rotated = (first * cos - second * sin, second * cos + first * sin)
    joined = torch.cat(rotated, -1) if halves else torch.stack(rotated, -1).flatten(-2)
    return torch.cat((x[..., :start], joined, x[..., start + size :]), -1)
