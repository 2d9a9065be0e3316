"""Coordinates of what a model reads: a number for each axis."""

from __future__ import annotations

import torch
from torch import Tensor


def coordinates(rows: int, columns: int, device: torch.device | None = None) -> Tensor:
    """x and y of the patches, row by row: (patches, 2), in fp32."""
    y = torch.arange(rows, device=device, dtype=torch.float32)
    x = torch.arange(columns, device=device, dtype=torch.float32)
    return torch.stack([x.repeat(rows), y.repeat_interleave(columns)], -1)
