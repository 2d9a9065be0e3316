"""RoPE along the axes of an image (Heo et al. 2024): x rotates one part of each head, y the other, or both mixed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.axes import TWO_AXES
from ..core.effects import CoordinateRotation, Effect, Geometry
from ..core.tables import frequency_tensor
from ..errors import UnsupportedCell
from .base import Scheme, register_scheme
from .frequencies import default_frequencies


def axial_frequencies(head_dim: int, theta: float) -> Tensor:
    """The frequency of each pair for each axis, (2, head_dim / 2): x rotates the first half of pairs, y the rest."""
    part = torch.tensor(default_frequencies(head_dim // 2, theta))
    still = torch.zeros_like(part)
    return torch.stack([torch.cat([part, still]), torch.cat([still, part])])


def mixed_frequencies(head_dim: int, theta: float, layers: int, heads: int, seed: int) -> Tensor:
    """The axial frequencies with the axes turned by a random angle for each head of each layer: (layers, 2, heads,
    pairs)."""
    generator = torch.Generator().manual_seed(seed)
    angle = torch.rand(layers, 1, heads, 1, generator=generator) * 2 * math.pi
    x, y = axial_frequencies(head_dim, theta)[:, None, None, None]
    along, across = x * angle.cos() - y * angle.sin(), x * angle.sin() + y * angle.cos()
    return torch.cat([along, across], 1)


class AxialRotation(CoordinateRotation):
    """The angles of image patches, from their coordinates."""

    posenc_frequencies: Tensor

    def __init__(self, frequencies: Tensor, mixed: bool):
        super().__init__()
        self.mixed = mixed
        self.posenc_frequencies = frequency_tensor(frequencies, saved=mixed, trained=mixed)

    def forward(self, layer: int, coordinates: Tensor) -> Tensor:
        along, across = self.posenc_frequencies[layer if self.mixed else 0]
        x, y = coordinates.to(along.device).unbind(-1)
        return x[:, None] * along[:, None] + y[:, None] * across[:, None]

    def extra_repr(self) -> str:
        layers, axes, heads, pairs = self.posenc_frequencies.shape
        shared = f"{layers} layers and {heads} heads of their own" if self.mixed else "one set for all layers"
        return f"axes={axes}, pairs={pairs}, {shared}"


@register_scheme
@dataclass(frozen=True, kw_only=True)
class AxialRope(Scheme):
    """Rotates q and k by the column and the row of their patch. Tokens that are not patches are not rotated.

    x rotates the first half of a head's channels and y the second, as neighbouring pairs with frequencies
    rope_theta^(-4i/head_dim). With `mixed` every head of every layer learns its own frequencies, for both axes and all
    pairs. These start as the axial ones turned by a random angle (from `seed`).
    """

    name = "axial_rope"
    summary = "rotation of q and k by column and row, of images only"
    axes = TWO_AXES
    nearest = "learned"

    rope_theta: float = 100.0
    mixed: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_number("rope_theta", above=1.0)
        self._check_flag("mixed")
        self._check_seed("seed")

    def refuse_other_axes(self, axes: int) -> None:
        if axes not in self.axes:
            raise UnsupportedCell("'axial_rope' rotates by rows and columns, and a text has neither. Use 'rope'.")

    def effect(self, geometry: Geometry) -> Effect:
        self.refuse_other_axes(geometry.axes)
        size = geometry.head_dim
        if size % 4:
            raise UnsupportedCell(
                f"'axial_rope' needs pairs of channels for both axes, and a head of this model has {size} channels, "
                "which is not a multiple of 4. Use 'fourier' or 'sinusoidal'."
            )
        if self.mixed:
            values = mixed_frequencies(size, self.rope_theta, geometry.layers, geometry.num_heads, self.seed)
        else:
            values = axial_frequencies(size, self.rope_theta)[None, :, None]
        return Effect(rotation=AxialRotation(values, self.mixed))
