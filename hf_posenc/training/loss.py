"""The loss of a language model without all logits at once: its head returns the loss instead of logits.

Logits of 8192 tokens over 49,152 words take several gigabytes. The loss is computed in parts inside the head's own
forward, since sharded weights are whole there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..compat.adapters import active_copy
from ..compat.pytorch import once_differentiable
from ..errors import PosencError
from .master_weights import master
from .rows import IGNORED

LOGITS = 2**24
"""How many logits are in memory at once, in fp32."""


def linear_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    counted: Tensor | None = None,
    size: int | None = None,
) -> Tensor:
    """The sum of cross entropies of `hidden @ weight.T + bias` in fp32, with only `size` rows in memory at a time.

    `counted` are the weights of tokens. Matrix products are computed in the precision of `hidden`.
    """
    kept = targets != IGNORED
    if not bool(kept.all()):
        hidden, targets = hidden[kept], targets[kept]
        counted = None if counted is None else counted[kept]
    size = size or rows_at_once(len(weight))
    return _InParts.apply(hidden, weight, bias, targets, counted, size, torch.is_grad_enabled())


def rows_at_once(vocabulary: int) -> int:
    """How many rows of logits are in memory at a time."""
    return max(128, min(4096, LOGITS // vocabulary))


class _InParts(torch.autograd.Function):
    """Gradients are computed with each part, while its logits are in memory, so nothing is computed twice."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        counted: Tensor | None,
        size: int,
        trained: bool,
    ) -> Tensor:
        wanted = [trained and needed for needed in ctx.needs_input_grad[:3]]
        parts = [hidden, weight, bias]
        own = [torch.zeros_like(p) if w and p is not None else None for p, w in zip(parts, wanted, strict=True)]
        total = hidden.new_zeros((), dtype=torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            read = weight.to(hidden.dtype)
            shift = None if bias is None else bias.to(hidden.dtype)
            for start in range(0, len(hidden), size):
                here = slice(start, start + size)
                count = None if counted is None else counted[here].float()
                logits = F.linear(hidden[here], read, shift).float()
                total += _part(logits, targets[here], count)
                _add_gradients(own, logits, hidden, read, here)
                del logits  # before the next part: otherwise two parts would be in memory
        ctx.save_for_backward(*own)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Any) -> Any:
        # In place, since the gradient of the weights is large. A second backward pass is an error.
        own = [None if grad is None else grad.mul_(outer[0].to(grad.dtype)) for grad in ctx.saved_tensors]
        return *own, None, None, None, None


def _part(logits: Tensor, targets: Tensor, counted: Tensor | None) -> Tensor:
    """The loss of a part. Its logits are overwritten by the gradient of the loss with respect to them."""
    wanted = targets[:, None]
    logits.sub_(logits.amax(-1, keepdim=True))  # all in place, to save memory
    own = logits.gather(1, wanted)
    every = logits.exp_().sum(-1, keepdim=True)
    losses = (every.log() - own)[:, 0]
    logits.div_(every).scatter_add_(1, wanted, torch.full_like(own, -1.0))
    if counted is not None:
        losses = losses * counted
        logits.mul_(counted[:, None])
    return losses.sum()


def _add_gradients(own: list[Tensor | None], logits: Tensor, hidden: Tensor, read: Tensor, here: slice) -> None:
    of_hidden, of_weight, of_bias = own
    if of_bias is not None:
        of_bias.add_(logits.sum(0))
    gradient = logits.to(hidden.dtype)
    if of_hidden is not None:
        torch.mm(gradient, read, out=of_hidden[here])
    if of_weight is not None and of_weight.dtype == hidden.dtype:
        of_weight.addmm_(gradient.T, hidden[here])
    elif of_weight is not None:
        of_weight.add_(gradient.T @ hidden[here])


@dataclass
class Wanted:
    """The targets of the head while it returns the loss."""

    targets: Tensor | None = None
    answers: Tensor | None = None
    weight: float = 1.0

    @property
    def token_weights(self) -> Tensor | None:
        """The weight of each token; None if all are equal."""
        if self.answers is None or self.weight == 1:
            return None
        return torch.where(self.answers.flatten(), self.weight, 1.0)


class LossHead:
    """Replaces the forward of a model's output layer. Outside of `expecting` it returns logits as usual."""

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
                f"The head was given {tuple(hidden.shape[:2])} tokens, and {tuple(targets.shape)} have targets: "
                "this model cannot be trained without all logits. Set train.full_logits: true."
            )
        weight, bias = master(self.layer, "weight"), master(self.layer, "bias")
        assert weight is not None
        flat = hidden.flatten(0, 1).to(compute_dtype(self.layer))
        loss = linear_loss(flat, weight, bias, targets.flatten(), self.wanted.token_weights)
        return loss.reshape(1, 1, 1).clone()  # FSDP2 adds a hook to it, which a view may lose

    @contextlib.contextmanager
    def expecting(self, wanted: Wanted) -> Iterator[None]:
        self.wanted = wanted
        try:
            yield
        finally:
            self.wanted = Wanted()

    def remove(self) -> None:
        del self.layer.forward


def compute_dtype(layer: nn.Module) -> torch.dtype:
    """The dtype that torch's linear layer would compute in here."""
    weight = master(layer, "weight")
    assert weight is not None
    if torch.is_autocast_enabled(weight.device.type):
        return torch.get_autocast_dtype(weight.device.type)
    rounded: dict[str, torch.dtype] = getattr(layer, "posenc_rounded", {})
    return rounded.get("weight", weight.dtype)


def output_layer(model: Any) -> Any:
    """The linear layer that computes logits, without PEFT's wrappers."""
    layer = active_copy(model.get_output_embeddings())
    if not isinstance(layer, nn.Linear):
        raise PosencError(
            f"The logits of {type(model).__name__} are computed by a {type(layer).__name__}, not by a plain linear "
            "layer: its loss needs all logits at once. Set train.full_logits: true."
        )
    return layer


def shift_labels(labels: Tensor) -> Tensor:
    """For each token, the label of the next one."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


@torch.no_grad()
def refuse_other_loss(model: Any, head: LossHead, inputs: dict[str, Tensor], causal: bool) -> None:
    """Raise if the head's loss is not the model's: a model may scale or cap its logits after the head."""
    ids, labels = (inputs[name][:1, :64].to(model.device) for name in ("input_ids", "labels"))
    if bool((labels == IGNORED).all()):
        labels = ids
    targets = shift_labels(labels) if causal else labels
    training, made = model.training, []
    watch = head.layer.register_forward_hook(lambda layer, args, out: made.append(out.float()))
    model.eval()
    try:
        own = model(input_ids=ids).logits.float()
        with head.expecting(Wanted(targets)):
            found = model(input_ids=ids).logits.float().sum()
    finally:
        watch.remove()
        model.train(training)
    # The logits must be exactly those of the head: then the model does not change them.
    same = len(made) == 2 and made[0].shape == own.shape and torch.equal(made[0], own)
    if not same or not torch.equal(made[1].sum(), found):
        plain = F.cross_entropy(own.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORED)
        raise PosencError(
            f"{type(model).__name__} changes its logits after the output layer (own loss {float(plain):.4f}, found "
            f"{float(found):.4f}), so its loss needs all of them at once. Set train.full_logits: true."
        )
