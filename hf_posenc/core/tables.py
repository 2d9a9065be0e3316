"""Modules that give a vector per position: computed at any length, or learned up to a limit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..compat.pytorch import SavableModule
from ..errors import PosencError
from .precision import Fp32Buffers

REACH = 2**18
"""Positions that a table with a forward of its own can be asked for."""


def frequency_tensor(values: Tensor, saved: bool = False, trained: bool = False) -> Tensor:
    """Frequencies as a part of a module: made anew from the scheme, or saved with the model, or trained as well."""
    return nn.Parameter(values, requires_grad=trained) if saved else nn.Buffer(values, persistent=False)


class RowReader:
    """Tells which rows a family's own table would read, where its forward takes something else than positions.

    That forward is run as it is, on a table of one column that holds the numbers of its rows.
    """

    def __init__(self, native: nn.Embedding):
        self.native = native

    def __call__(self, device: torch.device, *args: Any, **kwargs: Any) -> Tensor:
        column = torch.arange(REACH, device=device, dtype=torch.float32)[:, None]
        rows: Tensor = functional_call(self.native, {"weight": column}, args, kwargs)
        return rows[..., 0].long()


class LastPositions:
    """The positions of the last pass. No part of a model's state: any two are alike."""

    positions: Tensor | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LastPositions)

    __hash__ = None  # type: ignore[assignment]


class ReplacementTable(SavableModule):
    """A table in the place of a family's own one: asked as that was, for rows of which `offset` are no positions."""

    offset: int = 0
    reader: RowReader | None = None
    sealed: bool = False
    """Whether checkpoints hold one row more than the config says, so that transformers alone refuses them."""
    notes: LastPositions | None = None
    """Where it writes down what it is asked for, if attention layers that are not told want to know."""

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
    """A position table that is computed, not stored, and so never ends.

    It saves itself as the `weight` of an embedding of `rows` rows, which is what the family itself would load; where
    the family has no such table, `rows` is None and nothing is saved.
    """

    follows_dtype = ("anchor",)
    axes = 1
    """With several there are no numbers of rows to ask for: it is called with coordinates, (places, axes)."""
    anchor: Tensor

    def __init__(self, size: int, rows: int | None, like: Tensor):
        super().__init__()
        self.size, self.rows = size, rows
        # Follows the model's dtype and device, and says which the vectors are wanted in.
        self.anchor = nn.Buffer(torch.empty(0, dtype=like.dtype, device=like.device), persistent=False)

    def vectors(self, coordinates: Tensor) -> Tensor:
        """The vectors of these places, (..., axes) -> (..., size), in fp32."""
        raise NotImplementedError

    def replace(self, native: nn.Embedding, offset: int) -> None:
        super().replace(native, offset)
        unmarked = [name for name, _ in self.named_parameters() if "posenc_" not in name]
        if unmarked:
            raise PosencError(
                f"{type(self).__name__} stands among the model's own weights, and its parameters {unmarked} could not "
                "be told from those in a checkpoint: give them names that begin with 'posenc_'."
            )

    @property
    def weight(self) -> Tensor | None:
        """What it saves itself as. Sharded saves look for everything by the name that it is saved under."""
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
    """No contribution from the input's position."""

    def vectors(self, coordinates: Tensor) -> Tensor:
        return torch.zeros((*coordinates.shape[:-1], self.size), device=coordinates.device)


class LearnedTable(ReplacementTable, nn.Embedding):
    """A trainable table that says where it ends instead of failing in an index."""

    def replace(self, native: nn.Embedding, offset: int) -> None:
        super().replace(native, offset)
        if offset:  # the rows before position 0 are the family's own, for padding
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
                    f"Position {last - self.offset} is past the end of this model's learned table, which holds "
                    f"{self.num_embeddings - self.offset}. Patch it with a larger target_length, or with a scheme "
                    "that has no end."
                )
        return nn.Embedding.forward(self, rows)
