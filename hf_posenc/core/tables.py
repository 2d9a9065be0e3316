"""Modules that give a vector per position, which is added to the input: computed for any position, or learned rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..compat.pytorch import SavableModule
from ..errors import PosencError
from .precision import Fp32Buffers

REACH = 2**18
"""The number of rows that `RowReader` offers to a table with its own forward."""


def frequency_tensor(values: Tensor, saved: bool = False, trained: bool = False) -> Tensor:
    """Frequencies as a buffer that is not saved, as a frozen parameter that is (`saved`), or as a trained one."""
    return nn.Parameter(values, requires_grad=trained) if saved else nn.Buffer(values, persistent=False)


class RowReader:
    """Finds the rows that a family's own table reads when its forward takes something else than position ids.

    It runs that forward on a table with one column that holds the row numbers.
    """

    def __init__(self, native: nn.Embedding):
        self.native = native

    def __call__(self, device: torch.device, *args: Any, **kwargs: Any) -> Tensor:
        column = torch.arange(REACH, device=device, dtype=torch.float32)[:, None]
        rows: Tensor = functional_call(self.native, {"weight": column}, args, kwargs)
        return rows[..., 0].long()


class LastPositions:
    """The positions of the last forward pass. They are no part of a model's state, so that all instances are equal."""

    positions: Tensor | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LastPositions)

    __hash__ = None  # type: ignore[assignment]


class ReplacementTable(SavableModule):
    """A table that replaces a family's own one and is called like it. Its first `offset` rows are not positions."""

    offset: int = 0
    reader: RowReader | None = None
    sealed: bool = False
    """Whether checkpoints hold one row more than the config says, so that plain transformers refuses to load them."""
    notes: LastPositions | None = None
    """Records the positions of each pass, if attention layers need them and do not get them as an argument."""

    def replace(self, native: nn.Embedding, offset: int) -> None:
        self.offset = offset
        if type(native).forward is not nn.Embedding.forward and not isinstance(native, ReplacementTable):
            self.reader = RowReader(native)

    def read_rows(self, device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        if self.reader is not None:
            rows = self.reader(device, *args, **kwargs)
        else:
            rows = args[0] if args else next(iter(kwargs.values()))
        if self.notes is not None:
            self.notes.positions = rows - self.offset
        return rows


class ComputedTable(ReplacementTable, Fp32Buffers):
    """A position table that is computed for any position.

    It is saved as the `weight` of an embedding with `rows` rows, which the family's own class can load. Where the
    family has no table, `rows` is None and nothing is saved.
    """

    follows_dtype = ("anchor",)
    axes = 1
    """With more than one axis it is called with coordinates, (tokens, axes), instead of row numbers."""
    anchor: Tensor

    def __init__(self, size: int, rows: int | None, like: Tensor):
        super().__init__()
        self.size, self.rows = size, rows
        # An empty tensor that follows the model's dtype and device: vectors are returned in these.
        self.anchor = nn.Buffer(torch.empty(0, dtype=like.dtype, device=like.device), persistent=False)

    def vectors(self, coordinates: Tensor) -> Tensor:
        """The vectors at these coordinates: (..., axes) -> (..., size), in fp32."""
        raise NotImplementedError

    def replace(self, native: nn.Embedding, offset: int) -> None:
        super().replace(native, offset)
        unmarked = [name for name, _ in self.named_parameters() if "posenc_" not in name]
        if unmarked:
            raise PosencError(
                f"The parameters {unmarked} of {type(self).__name__} could be confused with the model's own weights "
                "in a checkpoint. Give them names that begin with 'posenc_'."
            )

    @property
    def weight(self) -> Tensor | None:
        """The table as it is saved. Sharded saves look up each saved tensor as an attribute of this name."""
        if self.rows is None:
            return None
        rows = self.rows + self.offset + self.sealed
        positions = torch.arange(rows, device=self.anchor.device) - self.offset
        with torch.no_grad():
            return self.vectors(positions[:, None]).to(self.anchor.dtype)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if self.axes > 1:
            return self.vectors(args[0])
        rows = self.read_rows(self.anchor.device, args, kwargs)
        return self.vectors((rows - self.offset)[..., None]).to(self.anchor.dtype)

    def after_saving(self, state: dict[str, Any], prefix: str) -> None:
        if (weight := self.weight) is not None:
            state[prefix + "weight"] = weight

    def before_loading(self, state: dict[str, Any], prefix: str) -> None:
        state.pop(prefix + "weight", None)

    def extra_repr(self) -> str:
        return f"size={self.size}"


class ZeroTable(ComputedTable):
    """A table of zeros: nothing is added to the input."""

    def vectors(self, coordinates: Tensor) -> Tensor:
        return torch.zeros((*coordinates.shape[:-1], self.size), device=coordinates.device)


class LearnedTable(ReplacementTable, nn.Embedding):
    """A trainable table. A position past its end raises an error with the reason."""

    def replace(self, native: nn.Embedding, offset: int) -> None:
        super().replace(native, offset)
        if offset:  # the family's own rows for padding come before position 0
            kept = torch.cat([native.weight.detach()[:offset], self.weight.detach()])
            self.weight = nn.Parameter(kept)
            self.num_embeddings = len(kept)

    def after_saving(self, state: dict[str, Any], prefix: str) -> None:
        if self.sealed:
            weight = state[prefix + "weight"]
            state[prefix + "weight"] = torch.cat([weight, weight.new_zeros(1, weight.shape[1])])

    def before_loading(self, state: dict[str, Any], prefix: str) -> None:
        stored = state.get(prefix + "weight")
        if self.sealed and stored is not None and len(stored) == self.num_embeddings + 1:
            state[prefix + "weight"] = stored[:-1]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        rows = self.read_rows(self.weight.device, args, kwargs)
        if not torch.compiler.is_compiling() and rows.numel():
            last = int(rows.max())
            if last >= self.num_embeddings:
                raise PosencError(
                    f"Position {last - self.offset} is past the end of this model's learned table, which has "
                    f"{self.num_embeddings - self.offset} rows. Patch it with a larger target_length, or with a "
                    "scheme without a limit, such as 'sinusoidal'."
                )
        return nn.Embedding.forward(self, rows)
