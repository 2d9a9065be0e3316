"""Coordinates of tokens, one number per axis. A text has one axis, an image two."""

from __future__ import annotations

from collections.abc import Sequence
from sys import maxsize

import torch
from torch import Tensor

ONE_AXIS = range(1, 2)
TWO_AXES = range(2, 3)
ANY_AXES = range(1, maxsize)
"""The numbers of axes that a scheme supports (`Scheme.axes`)."""


def grid_coordinates(sizes: Sequence[int], device: torch.device | None = None) -> Tensor:
    """The coordinates of every cell of a grid, in the order of its tokens: (tokens, axes), in fp32.

    `sizes` go from the slowest axis to the fastest, such as (rows, columns). Coordinates go the other way: x, then y.
    """
    along = [torch.arange(size, device=device, dtype=torch.float32) for size in sizes]
    places = torch.meshgrid(*along, indexing="ij")
    return torch.stack([place.flatten() for place in reversed(places)], -1)
