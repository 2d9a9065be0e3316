"""Coordinates: where a token stands, a number for each axis. A text has one axis, an image two."""

from __future__ import annotations

from collections.abc import Sequence
from sys import maxsize

import torch
from torch import Tensor

ONE_AXIS = range(1, 2)
TWO_AXES = range(2, 3)
ANY_AXES = range(1, maxsize)
"""How many axes a scheme can be given."""


def grid_coordinates(sizes: Sequence[int], device: torch.device | None = None) -> Tensor:
    """The coordinates of every place of a grid, in the order of its tokens: (tokens, axes), in fp32.

    `sizes` are those of the grid from the slowest axis to the fastest, such as rows and columns; coordinates are
    given the other way round: x, then y.
    """
    along = [torch.arange(size, device=device, dtype=torch.float32) for size in sizes]
    places = torch.meshgrid(*along, indexing="ij")
    return torch.stack([place.flatten() for place in reversed(places)], -1)
