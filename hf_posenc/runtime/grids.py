"""Grids of image patches: hooks that tell the layers of a patched vision model the rows and columns of each image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..compat.models import attention_of
from ..core.axes import grid_coordinates
from ..errors import PosencError
from ..families.places import argument_names
from .positions import PREFIX, named_arguments

GRID = "posenc_grid"
"""The argument by which a model passes rows and columns to its attention layers. No state is kept between calls, so
that images of several sizes can be in progress at once, as with gradient checkpointing."""
FLAG = "interpolate_pos_encoding"
"""The argument, and the method, by which transformers reads a table at another image size."""


def resize_table(table: Tensor, special: int, side: int, antialias: bool = False) -> Tensor:
    """Resize a table of special tokens and a square grid, (rows, size), bicubically to a grid of `side` x `side`."""
    apart, grid = table[:special], table[special:]
    own = round(len(grid) ** 0.5)
    if own == side:
        return table.clone()
    square = grid.float().reshape(1, own, own, -1).permute(0, 3, 1, 2)
    larger = F.interpolate(square, size=(side, side), mode="bicubic", align_corners=False, antialias=antialias)
    return torch.cat([apart, larger.permute(0, 2, 3, 1).flatten(0, 2).to(table.dtype)])


def rotate_neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbouring channels of (batch, heads, tokens, channels) as pairs."""
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)


class GridMask(NamedTuple):
    """A mask together with rows and columns, passed as `attention_mask` because some models pass no other argument."""

    mask: Tensor | None
    grid: tuple[int, ...]


class GridLink:
    """Connects an attention layer of a vision model to its rotation. It is not a module, so that it is not saved."""

    bias = None

    def __init__(self, root: Any, layer: int, special: int):
        self.root, self.layer, self.special = root, layer, special

    def unpack(self, mask: Any) -> GridMask:
        """The mask that the layer was given, which must carry the rows and columns."""
        if not isinstance(mask, GridMask):
            raise PosencError(
                "This layer of a patched model was called by itself, without the rows and columns of its image. "
                f"Call the model, or give {GRID}=(rows, columns)."
            )
        return mask

    def rotate(self, query: Tensor, key: Tensor, grid: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Rotate the queries and keys of patches. Special tokens, which come first, are not rotated."""
        places = grid_coordinates(grid, query.device)
        if query.shape[2] != self.special + len(places):
            rows, columns = grid
            raise PosencError(
                f"This patched model attends to {query.shape[2]} tokens, but {self.special} special tokens and {rows} "
                f"rows and {columns} columns of patches are {self.special + len(places)}: the row and column of each "
                "token is not known. Call the model with whole images."
            )
        angles = F.pad(self.root.posenc_rotation(self.layer, places), (0, 0, self.special, 0)).to(query.device)
        cos, sin = angles.cos().to(query.dtype), angles.sin().to(query.dtype)
        return rotate_neighbours(query, cos, sin), rotate_neighbours(key, cos, sin)


class GridReader:
    """Replaces a family's own method that reads its table at the size of an image."""

    def __init__(self, root: Any, special: int):
        self.root, self.special = root, special

    def __call__(self, embeddings: Tensor, height: int, width: int) -> Tensor:
        table = getattr(self.root, "posenc_table", None)
        if table is None:
            return embeddings.new_zeros(1)
        places = grid_coordinates(grid_size(self.root, (height, width)), embeddings.device)
        return F.pad(table(places), (0, 0, self.special, 0))[None].to(embeddings)


def grid_size(root: Any, size: Sequence[int]) -> tuple[int, ...]:
    """Rows and columns of patches in an image; pixels beyond the last whole patch are ignored."""
    return tuple(side // step for side, step in zip(size, root.posenc_patch, strict=True))


def before_image(root: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of a vision model that rotates: passes the rows and columns of the image to its layers."""
    name, given = attention_of(root.config), named_arguments(root, args, kwargs)
    if not name.startswith(PREFIX):
        raise PosencError(
            f"This model is patched, and its attention was then set to {name!r}, which would drop its positions. "
            f"Set it to {PREFIX + 'sdpa'!r} or {PREFIX + 'eager'!r}, or call unpatch_model first."
        )
    pixels = given.get("pixel_values")
    if pixels is None:
        return None  # the model itself raises an error
    return (), {**given, GRID: grid_size(root, pixels.shape[-len(root.posenc_patch) :])}


def before_rotation(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of an attention layer: passes rows and columns on with the mask."""
    given = dict(named_arguments(layer, args, kwargs))
    grid = given.pop(GRID, None)
    if grid is None:
        return None
    return (), {**given, "attention_mask": GridMask(given.get("attention_mask"), grid)}


def before_patches(embeddings: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of the embeddings: makes them accept images of any size."""
    given = named_arguments(embeddings, args, kwargs)
    return (), {**given, FLAG: True} if FLAG in argument_names(embeddings) else given
