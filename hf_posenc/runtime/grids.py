"""Positions in images: how a patched model learns the rows and columns of each image, and what it does with them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..compat.models import attention_of
from ..errors import PosencError
from ..families.finding import argument_names
from .positions import PREFIX, named_arguments

GRID = "posenc_grid"
"""The argument that takes rows and columns from the model to its attention layers. No state is kept between calls, so
that images of several sizes can be under way at once, as with gradient checkpointing."""
FLAG = "interpolate_pos_encoding"
"""The argument, and the method, through which transformers reads a table at another size."""


def resized(table: Tensor, special: int, side: int, antialias: bool = False) -> Tensor:
    """A table of special tokens and a square grid, (rows, size), with a grid of `side` x `side`, bicubically."""
    apart, grid = table[:special], table[special:]
    own = round(len(grid) ** 0.5)
    if own == side:
        return table.clone()
    square = grid.float().reshape(1, own, own, -1).permute(0, 3, 1, 2)
    larger = F.interpolate(square, size=(side, side), mode="bicubic", align_corners=False, antialias=antialias)
    return torch.cat([apart, larger.permute(0, 2, 3, 1).flatten(0, 2).to(table.dtype)])


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Neighbouring channels of (batch, heads, tokens, channels) rotated as pairs."""
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)


class Told(NamedTuple):
    """What an attention layer of a patched model is given as its mask: some models pass on nothing else."""

    mask: Tensor | None
    grid: tuple[int, int]


class GridLink:
    """How an attention layer finds what rotates its queries and keys. Not a module, so not saved."""

    bias = None

    def __init__(self, root: Any, layer: int, special: int):
        self.root, self.layer, self.special = root, layer, special

    def told(self, mask: Any) -> Told:
        if not isinstance(mask, Told):
            raise PosencError(
                "This layer of a patched model was called by itself and not told the rows and columns of its image. "
                f"Call the model, or give {GRID}=(rows, columns)."
            )
        return mask

    def rotate(self, query: Tensor, key: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Queries and keys of patches rotated; the tokens before them, which are no patches, as they are."""
        rows, columns = grid
        if query.shape[2] != self.special + rows * columns:
            raise PosencError(
                f"This patched model attends to {query.shape[2]} tokens, and {rows} rows and {columns} columns of "
                f"patches behind {self.special} other tokens are {self.special + rows * columns}: where each stands "
                "is not known."
            )
        angles = F.pad(self.root.posenc_rotation(self.layer, rows, columns), (0, 0, self.special, 0)).to(query.device)
        cos, sin = angles.cos().to(query.dtype), angles.sin().to(query.dtype)
        return rotated(query, cos, sin), rotated(key, cos, sin)


class GridReader:
    """Stands in for a family's own method that reads its table at the size of an image."""

    def __init__(self, root: Any, special: int):
        self.root, self.special = root, special

    def __call__(self, embeddings: Tensor, height: int, width: int) -> Tensor:
        table = getattr(self.root, "posenc_table", None)
        if table is None:
            return embeddings.new_zeros(1)
        rows, columns = grid_of(self.root, height, width)
        return F.pad(table(rows, columns), (0, 0, self.special, 0))[None].to(embeddings)


def grid_of(root: Any, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of patches of an image; a rest of pixels belongs to none."""
    return height // root.posenc_patch[0], width // root.posenc_patch[1]


def before_image(root: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of a model that rotates: tells its layers the rows and columns of the image."""
    name, given = attention_of(root.config), named_arguments(root, args, kwargs)
    if not name.startswith(PREFIX):
        raise PosencError(
            f"This model is patched, and its attention was then set to {name!r}, which would drop its positions. "
            f"Set it to {PREFIX + 'sdpa'!r} or {PREFIX + 'eager'!r}, or call unpatch_model first."
        )
    pixels = given.get("pixel_values")
    if pixels is None:
        return None  # which the model itself refuses
    return (), {**given, GRID: grid_of(root, *pixels.shape[-2:])}


def before_rotation(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of an attention layer: hands rows and columns on with the mask."""
    given = dict(named_arguments(layer, args, kwargs))
    grid = given.pop(GRID, None)
    if grid is None:
        return None
    return (), {**given, "attention_mask": Told(given.get("attention_mask"), grid)}


def before_patches(embeddings: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of the embeddings: lets them take an image of any size."""
    given = named_arguments(embeddings, args, kwargs)
    return (), {**given, FLAG: True} if FLAG in argument_names(embeddings) else given
