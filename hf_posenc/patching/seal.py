"""The marks of models that only this package can run: in the config for transformers, in the weights for all others.

Runtimes that ignore what a config says about attention and RoPE still load every tensor of a checkpoint. The seal is a
tensor that they have no place for, so they refuse.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..compat.pytorch import SavableModule
from ..errors import PosencError
from ..families import Places
from ..runtime.positions import SEAL
from .edits import Swap
from .records import Record

NAME = "posenc_seal"
MARKS: dict[str, Any] = {
    "attn_implementation": SEAL,
    "experts_implementation": SEAL,  # checked in every model, even if the user chooses another attention
    "pruned_heads": {SEAL: []},  # for transformers 4, which ignores the others and expects numbers here
}
"""What `config.json` of a sealed model says. Every transformers refuses it, and prints it."""
SINCE_FORMAT_2 = ("experts_implementation", "pruned_heads")


class Seal(SavableModule):
    """One number on the base model. It is saved, moved and cast with the model, and nothing computes with it."""

    weight: Tensor

    def __init__(self, like: Tensor):
        super().__init__()
        dtype = like.dtype if like.is_floating_point() else torch.float32
        self.weight = nn.Buffer(torch.ones(1, dtype=dtype, device=like.device))

    def before_loading(self, state: dict[str, Any], prefix: str) -> None:
        """Weights of the unpatched model, which have no seal, may be put into a patched one."""
        state.setdefault(prefix + "weight", self.weight)


def seal_edits(where: Places) -> list[Swap]:
    marks = [Swap(where.model_config, name, copy.deepcopy(value)) for name, value in MARKS.items()]
    return [*marks, Swap(where.base, NAME, Seal(where.stacks[0].weight.weight))]


def seal_faults(model: PreTrainedModel) -> list[str]:
    """Where a live model is not sealed as its config says."""
    said = getattr(model.config, "attn_implementation", None) == SEAL
    if said == isinstance(getattr(model.base_model, NAME, None), Seal):
        return []
    return [f"the base model has lost its {NAME!r}" if said else f"the scheme needs no {NAME!r}"]


def is_sealed_config(raw: dict[str, Any]) -> bool:
    """Whether a config.json says that only this package can run its model."""
    return raw.get("attn_implementation") == SEAL


def has_seal(names: Iterable[str]) -> bool:
    """Whether one of these names of weights is that of a seal, with the prefix of a base model or without."""
    return NAME in {part for name in names for part in name.split(".")}


def check_seal(where: str, raw: dict[str, Any], record: Record, names: Iterable[str]) -> bool:
    """Whether the checkpoint is sealed. Raises where its config and its weights do not agree on that.

    `names`: those of its weights.
    """
    said, found = is_sealed_config(raw), has_seal(names)
    if said and not found and record.format > 1:
        raise PosencError(
            f"The weights in {where} lack their seal ({NAME}): they are not those that were saved with its "
            "config.json, or another tool has rewritten them. Save or patch the original again."
        )
    if found and not said:
        raise PosencError(
            f"The weights in {where} are sealed, and its config.json has attn_implementation="
            f"{raw.get('attn_implementation')!r}, which is no seal: they do not belong together."
        )
    return said
