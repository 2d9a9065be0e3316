"""Where the bias of a block of queries comes from, and where its gradient goes.

In a block the last query comes first: then query i and key j stand at number i + j of the distances, which fall. A
bias of distance is a view of its numbers with both strides one, and its gradient is a sum along diagonals.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.func import functional_call

from ..core.biases import Bias, Factors


class Part(NamedTuple):
    """A block of queries, and how many keys any of them sees."""

    start: int
    end: int
    keys: int

    @property
    def length(self) -> int:
        return self.end - self.start


class Source(Protocol):
    """Where the bias of a block comes from, and where its gradient goes."""

    def rows(self, part: Part) -> Tensor:
        """(batch or 1, heads, queries, keys), the last query first."""

    def take(self, part: Part, batch: slice, heads: slice, padded: Tensor) -> None:
        """The gradient of some rows and heads, (rows, heads, queries, keys + queries), with zeros behind the keys."""

    def finish(self, part: Part) -> None:
        """All of a block has been taken."""

    def gradients(self) -> tuple[Tensor, ...]: ...


class Diagonals:
    """A bias of distance where slots tell distances: one number per head and distance."""

    def __init__(self, numbers: Tensor, length: int):
        self.numbers, self.length = numbers, length
        self.gradient = torch.zeros_like(numbers)

    def rows(self, part: Part) -> Tensor:
        heads, count = self.numbers.shape
        size, first = (1, heads, part.length, part.keys), self.length - part.end
        return self.numbers.as_strided(size, (0, count, 1, 1), self.numbers.storage_offset() + first)

    def take(self, part: Part, batch: slice, heads: slice, padded: Tensor) -> None:
        sheared, first = _sheared(padded), self.length - part.end
        self.gradient[heads, first : first + sheared.shape[3]] += sheared.sum((0, 2))

    def finish(self, part: Part) -> None:
        pass

    def gradients(self) -> tuple[Tensor, ...]:
        return (self.gradient,)


class Pairs:
    """Any bias, from the positions of queries and keys; its own gradient is autograd's, a block at a time."""

    def __init__(
        self, bias: Bias, names: tuple[str, ...], query: Tensor, key: Tensor, dtype: torch.dtype, *trained: Tensor
    ):
        self.bias, self.query, self.key, self.dtype = bias, query, key, dtype
        self.trained = {name: p.detach().requires_grad_() for name, p in zip(names, trained, strict=True)}
        self.sums = [torch.zeros_like(p) for p in self.trained.values()]

    def rows(self, part: Part) -> Tensor:
        query = self.query[:, part.start : part.end].flip(1)
        with torch.enable_grad():
            given = (query, self.key[:, : part.keys], self.dtype)
            self.block: Tensor = functional_call(self.bias, self.trained, given)
        self.gradient = torch.zeros_like(self.block)
        return self.block.detach()

    def take(self, part: Part, batch: slice, heads: slice, padded: Tensor) -> None:
        found = padded[..., : part.keys]
        if not self.trained:
            return
        if len(self.gradient) == 1:
            self.gradient[:, heads] += found.sum(0)
        else:
            self.gradient[batch, heads] += found

    def finish(self, part: Part) -> None:
        if not self.trained:
            return
        found = torch.autograd.grad(self.block, list(self.trained.values()), self.gradient, allow_unused=True)
        for total, more in zip(self.sums, found, strict=True):
            total += 0 if more is None else more

    def gradients(self) -> tuple[Tensor, ...]:
        return tuple(self.sums)


class Products:
    """A bias that is a product of what the query and what the distance give, but for a few bends, where slots tell
    distances. A block is written with a column for each distance, which a view shifts from row to row."""

    def __init__(
        self, bias: Bias, names: tuple[str, ...], query: Tensor, first: int, dtype: torch.dtype, *trained: Tensor
    ):
        self.bias, self.query, self.first, self.dtype = bias, query, first, dtype
        self.trained = {name: p.detach().requires_grad_() for name, p in zip(names, trained, strict=True)}
        self.sums = [torch.zeros_like(p) for p in self.trained.values()]
        self.room = query.new_empty(0, dtype=dtype)

    def rows(self, part: Part) -> Tensor:
        last, width = self.first + part.end - 1, part.length + part.keys - 1
        query = self.query[:, part.start : part.end].flip(1)
        distances = torch.arange(last, last - width, -1, device=query.device)
        with torch.set_grad_enabled(bool(self.trained)):
            self.factors: Factors = functional_call(self.bias, self.trained, (query, distances, self.dtype, True))
        self.gradient = [torch.zeros_like(x) for x in self.factors.tensors]
        factors = self.factors.detach()
        shape = (len(query), len(factors.slope), part.length, width)
        if self.room.numel() < math.prod(shape):  # the last block is the largest, and the memory of one is used again
            self.room = self.room.new_empty(math.prod(shape))
        written = self.room[: math.prod(shape)].view(shape)
        torch.addcmul(factors.height[:, None], factors.scale[:, None, :, None], factors.slope[:, None], out=written)
        for start, bend in zip(factors.starts, factors.bends, strict=True):
            written[..., start : start + bend.shape[3]] += bend
        written[..., last + 1 :] = -torch.inf  # keys after their query
        strides = (*written.stride()[:2], width + 1, 1)
        return written.as_strided((*shape[:3], part.keys), strides)

    def take(self, part: Part, batch: slice, heads: slice, padded: Tensor) -> None:
        if not self.trained:
            return
        sheared, factors = _sheared(padded), self.factors.detach()
        of_scale, of_slope, of_height, *of_bends = self.gradient
        batch = slice(None) if len(of_scale) == 1 else batch
        scale = factors.scale[batch]
        both = torch.stack([scale, torch.ones_like(scale)], 1)[:, None]
        found = (both @ sheared).sum(0)
        of_slope[heads] += found[:, 0]
        of_height[heads] += found[:, 1]
        of_scale[batch] += (sheared @ factors.slope[heads, :, None]).sum(1)[..., 0].sum_to_size(scale.shape)
        for start, total in zip(factors.starts, of_bends, strict=True):
            here = sheared[..., start : start + total.shape[3]]
            total[batch, heads] += here.sum_to_size(len(scale), *here.shape[1:])

    def finish(self, part: Part) -> None:
        if not self.trained:
            return
        pairs = [(x, g) for x, g in zip(self.factors.tensors, self.gradient, strict=True) if x.requires_grad]
        outputs, gradients = zip(*pairs, strict=True)
        found = torch.autograd.grad(outputs, list(self.trained.values()), gradients, allow_unused=True)
        for total, more in zip(self.sums, found, strict=True):
            total += 0 if more is None else more

    def gradients(self) -> tuple[Tensor, ...]:
        return tuple(self.sums)


def _sheared(padded: Tensor) -> Tensor:
    """Rows of keys with zeros behind them, as rows of distances: one step less from row to row, and each diagonal is a
    column; what comes in from the row before is zero."""
    width = padded.shape[3] - 1
    return padded.as_strided((*padded.shape[:3], width), (*padded.stride()[:2], width, 1), padded.storage_offset())
