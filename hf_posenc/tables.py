"""Modules that give a vector per position: computed at any length, or learned up to a limit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .precision import Fp32Buffers
from .registry import PosencError


class ComputedTable(Fp32Buffers):
    """A position table that is computed, not stored, and so never ends.

    It saves itself as the `weight` of an embedding of `rows` rows, which is what the family itself would load; where
    the family has no such table, `rows` is None and nothing is saved.
    """

    follows_dtype = ("anchor",)
    anchor: Tensor

    def __init__(self, size: int, rows: int | None, like: Tensor):
        super().__init__()
        self.size, self.rows = size, rows
        # Follows the model's dtype and device, and says which the vectors are wanted in.
        self.anchor = nn.Buffer(torch.empty(0, dtype=like.dtype, device=like.device), persistent=False)

    def vectors(self, positions: Tensor) -> Tensor:
        """The vectors of these positions, in fp32."""
        raise NotImplementedError

    def forward(self, positions: Tensor) -> Tensor:
        return self.vectors(positions).to(self.anchor.dtype)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.rows is not None:
            destination[prefix + "weight"] = self(torch.arange(self.rows, device=self.anchor.device))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        state_dict.pop(prefix + "weight", None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"size={self.size}"


class ZeroTable(ComputedTable):
    """No contribution from the input's position."""

    def vectors(self, positions: Tensor) -> Tensor:
        return torch.zeros((*positions.shape, self.size), device=positions.device)


class LearnedTable(nn.Embedding):
    """A trainable table that says where it ends instead of failing in an index."""

    def forward(self, positions: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and positions.numel():
            last = int(positions.max())
            if last >= self.num_embeddings:
                raise PosencError(
                    f"Position {last} is past the end of this model's learned table, which holds "
                    f"{self.num_embeddings}. Patch it with a larger target_length, or with a scheme that has no end."
                )
        return super().forward(positions)
