"""Where the bias of a block of queries comes from, and where its gradient goes.

In a block the last query comes first, and distances are listed from the largest down. So the pair of query i and key j
is at entry i + j of the list: a bias of distance is a view of its numbers with both strides one, and its gradient is a
sum along diagonals.
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

    def begin(self, part: Part) -> None:
        """Begin a block. `rows` and `take` are then about this block."""

    def rows(self, part: Part, batch: slice, heads: slice) -> Tensor:
        """The bias of some rows and heads, (rows or 1, heads, queries, keys), the last query first. The next call may
        overwrite it."""

    def take(self, part: Part, batch: slice, heads: slice, padded: Tensor) -> None:
        """Add the gradient of some rows and heads, (rows, heads, queries, keys + queries), with zeros behind keys."""

    def finish(self, part: Part) -> None:
        """End a block, all of whose gradients have been added."""

    def gradients(self) -> tuple[Tensor, ...]: ...


class Diagonals:
    """A bias of distance where slots tell distances: one number per head and distance."""

    def __init__(self, numbers: Tensor, length: int):
        self.numbers, self.length = numbers, length
        self.gradient = torch.zeros_like(numbers)

    def begin(self, part: Part) -> None:
        pass

    def rows(self, part: Part, batch: slice, heads: slice) -> Tensor:
        numbers = self.numbers[heads, self.length - part.end :]
        size, strides = (1, len(numbers), part.length, part.keys), (0, numbers.stride(0), 1, 1)
        return numbers.as_strided(size, strides, numbers.storage_offset())

    def take(self, part: Part, batch: slice, heads: slice, padded: Tensor) -> None:
        sheared, first = _shear(padded), self.length - part.end
        self.gradient[heads, first : first + sheared.shape[3]] += sheared.sum((0, 2))

    def finish(self, part: Part) -> None:
        pass

    def gradients(self) -> tuple[Tensor, ...]:
        return (self.gradient,)


class Pairs:
    """Any bias, computed from the positions of queries and keys. Autograd differentiates it, a block at a time."""

    def __init__(
        self, bias: Bias, names: tuple[str, ...], query: Tensor, key: Tensor, dtype: torch.dtype, *trained: Tensor
    ):
        self.bias, self.query, self.key, self.dtype = bias, query, key, dtype
        self.trained = {name: p.detach().requires_grad_() for name, p in zip(names, trained, strict=True)}
        self.sums = [torch.zeros_like(p) for p in self.trained.values()]

    def begin(self, part: Part) -> None:
        query = self.query[:, part.start : part.end].flip(1)
        with torch.enable_grad():
            given = (query, self.key[:, : part.keys], self.dtype)
            self.block: Tensor = functional_call(self.bias, self.trained, given)
        self.gradient = torch.zeros_like(self.block)

    def rows(self, part: Part, batch: slice, heads: slice) -> Tensor:
        return self.block.detach()[batch if len(self.block) > 1 else slice(None), heads]

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
    """A bias that is a product of a factor of the query and one of the distance, plus a few bends, where slots tell
    distances. It is written with a column for each distance. A view of it shifts by one column from row to row."""

    def __init__(
        self, bias: Bias, names: tuple[str, ...], query: Tensor, first: int, dtype: torch.dtype, *trained: Tensor
    ):
        self.bias, self.query, self.first, self.dtype = bias, query, first, dtype
        self.trained = {name: p.detach().requires_grad_() for name, p in zip(names, trained, strict=True)}
        self.sums = [torch.zeros_like(p) for p in self.trained.values()]
        self.room = query.new_empty(0, dtype=dtype)

    def begin(self, part: Part) -> None:
        last = self.first + part.end - 1
        query = self.query[:, part.start : part.end].flip(1)
        distances = torch.arange(last, last - part.length - part.keys + 1, -1, device=query.device)
        with torch.set_grad_enabled(bool(self.trained)):
            self.found: Factors = functional_call(self.bias, self.trained, (query, distances, self.dtype, True))
        self.factors = self.found.each(Tensor.detach)
        self.gradient = self.factors.each(torch.zeros_like) if self.trained else None

    def rows(self, part: Part, batch: slice, heads: slice) -> Tensor:
        scale, slope, height, bends = self.factors.some(batch, heads)
        shape = (len(scale), len(slope), part.length, slope.shape[1])
        if self.room.numel() < math.prod(shape):  # the same memory for all blocks, of which the last is the largest
            most = self.first + self.query.shape[1] + part.length
            self.room = self.room.new_empty(math.prod(shape[:3]) * most)
        written = self.room[: math.prod(shape)].view(shape)
        torch.addcmul(height[:, None], scale[:, None, :, None], slope[:, None], out=written)
        for start, outer, inner in bends:
            written[..., start : start + inner.shape[2]].addcmul_(outer[:, None, None], inner[:, None])
        written[..., self.first + part.end :] = -torch.inf  # keys after their query
        return written.as_strided((*shape[:3], part.keys), (*written.stride()[:2], shape[3] + 1, 1))

    def take(self, part: Part, batch: slice, heads: slice, padded: Tensor) -> None:
        if self.gradient is None:
            return
        sheared = _shear(padded)
        scale, slope, _, bends = self.factors.some(batch, heads)
        of_scale, of_slope, of_height, of_bends = self.gradient.some(batch, heads)
        both = (torch.stack([scale, torch.ones_like(scale)], 1)[:, None] @ sheared).sum(0)
        of_slope += both[:, 0]
        of_height += both[:, 1]
        of_scale += (sheared @ slope[:, :, None])[..., 0].sum(1).sum_to_size(scale.shape)
        for (start, outer, inner), (_, of_outer, of_inner) in zip(bends, of_bends, strict=True):
            here = sheared[..., start : start + inner.shape[2]]
            of_outer += (here * inner[:, None]).sum((0, 2, 3))
            of_inner += (here * outer[:, None, None]).sum(1).sum_to_size(inner.shape)

    def finish(self, part: Part) -> None:
        if self.gradient is None:
            return
        pairs = zip(self.found.tensors, self.gradient.tensors, strict=True)
        outputs, gradients = zip(*((x, g) for x, g in pairs if x.requires_grad), strict=True)
        found = torch.autograd.grad(outputs, list(self.trained.values()), gradients, allow_unused=True)
        for total, more in zip(self.sums, found, strict=True):
            total += 0 if more is None else more

    def gradients(self) -> tuple[Tensor, ...]:
        return tuple(self.sums)


def _shear(padded: Tensor) -> Tensor:
    """Turn rows of keys into rows of distances: each row starts one step further left, so that diagonals become
    columns. The zeros after the keys fill what moves in from the row before."""
    width = padded.shape[3] - 1
    return padded.as_strided((*padded.shape[:3], width), (*padded.stride()[:2], width, 1), padded.storage_offset())
