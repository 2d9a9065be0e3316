"""The loss of a language model without all logits at once: its head answers with the loss instead of logits.

Logits of 8192 tokens over 49,152 words take gigabytes, several times over. The head's own forward, where its weights
are whole even when they are sharded, computes the loss in parts that are thrown away.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..compat.adapters import active_copy
from ..errors import PosencError
from .rows import IGNORED

CHUNK = 256
"""Tokens whose logits are held at once. Left to itself torch takes as few as one where the model is narrow."""


def linear_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    """The sum of cross entropies of `hidden @ weight.T + bias`, of which only a part exists at a time."""
    if hasattr(nn, "LinearCrossEntropyOptions"):
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=min(CHUNK, len(hidden)))
        return F.linear_cross_entropy(hidden, weight, targets, linear_bias=bias, reduction="sum", options=options)
    return chunked_loss(hidden, weight, bias, targets)


def chunked_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, size: int = CHUNK) -> Tensor:
    """The same with parts of `size` tokens, which are computed again for the gradient."""

    def part(hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight, bias).float(), targets, reduction="sum", ignore_index=IGNORED)

    losses = [
        checkpoint(part, h, t, use_reentrant=False)
        for h, t in zip(hidden.split(size), targets.split(size), strict=True)
    ]
    return torch.stack(losses).sum()


@dataclass
class Wanted:
    """What the head is to predict, while it answers with the loss."""

    targets: Tensor | None = None
    answers: Tensor | None = None
    weight: float = 1.0


class LossHead:
    """Stands in for the forward of a model's output layer. Outside of `expecting` it makes logits as ever."""

    def __init__(self, model: Any):
        self.layer = output_layer(model)
        self.own = self.layer.forward
        self.wanted = Wanted()
        self.layer.forward = self.forward

    def forward(self, hidden: Tensor) -> Tensor:
        targets = self.wanted.targets
        if targets is None:
            return self.own(hidden)
        if hidden.shape[:2] != targets.shape:
            raise PosencError(
                f"The head was given {tuple(hidden.shape[:2])} tokens and {tuple(targets.shape)} are to be predicted: "
                "this model cannot be trained without all logits. Set train.full_logits: true."
            )
        weight, bias = (None if p is None else in_autocast(p) for p in (self.layer.weight, self.layer.bias))
        assert weight is not None
        flat, wanted = hidden.flatten(0, 1).to(weight.dtype), targets.flatten()
        loss = linear_loss(flat, weight, bias, wanted)
        if self.wanted.answers is not None and self.wanted.weight != 1:
            chosen = self.wanted.answers.flatten()
            extra = F.cross_entropy(
                F.linear(flat[chosen], weight, bias).float(), wanted[chosen], reduction="sum", ignore_index=IGNORED
            )
            loss = loss + (self.wanted.weight - 1) * extra
        return loss.float().reshape(1, 1, 1).clone()  # FSDP2 hangs a hook on it, which a view may lose

    @contextlib.contextmanager
    def expecting(self, wanted: Wanted) -> Iterator[None]:
        self.wanted = wanted
        try:
            yield
        finally:
            self.wanted = Wanted()

    def remove(self) -> None:
        del self.layer.forward


def in_autocast(parameter: Tensor) -> Tensor:
    """As torch's own linear layer would see it: the fused loss does not heed autocast."""
    kind = parameter.device.type
    return parameter.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else parameter


def output_layer(model: Any) -> Any:
    """The linear layer that makes logits, inside whatever PEFT has put around it."""
    layer = active_copy(model.get_output_embeddings())
    if not isinstance(layer, nn.Linear):
        raise PosencError(
            f"The logits of {type(model).__name__} are made by a {type(layer).__name__}, not by a plain linear layer: "
            "its loss takes all logits at once. Set train.full_logits: true."
        )
    return layer


def shifted(labels: Tensor) -> Tensor:
    """The label of the token after each."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


@torch.no_grad()
def refuse_other_loss(model: Any, head: LossHead, inputs: dict[str, Tensor], causal: bool) -> None:
    """Raise where the head's loss is not the model's own: it may scale or cap its logits after the head."""
    ids, labels = (inputs[name][:1, :64] for name in ("input_ids", "labels"))
    if bool((labels == IGNORED).all()):
        labels = ids
    training = model.training
    model.eval()
    try:
        own = model(input_ids=ids).logits.float()
        targets = shifted(labels) if causal else labels
        plain = F.cross_entropy(own.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORED)
        with head.expecting(Wanted(targets)):
            found = model(input_ids=ids).logits.sum()
    finally:
        model.train(training)
    if not torch.allclose(plain, found.float(), rtol=1e-3 if own.dtype == torch.float32 else 2e-2):
        raise PosencError(
            f"{type(model).__name__} changes its logits after the output layer (own loss {float(plain):.4f}, found "
            f"{float(found):.4f}), so that its loss takes all of them at once. Set train.full_logits: true."
        )
