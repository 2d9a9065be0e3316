"""An estimate of the memory of a training step, from the sizes of the model and the settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .loss import rows_at_once
from .settings import Settings
from .tuning import estimate_trainable, layer_sizes, layers_to_adapt

FULL = 4
"""Bytes of a value in fp32, for trained parameters and their gradients."""
MOMENTS = {"adamw_torch_8bit": 2, "adamw_8bit": 2, "paged_adamw_8bit": 2, "adafactor": 0}
"""Bytes of optimizer state for each value, for optimizers other than Adam in fp32."""
NARROW, WIDE = 12, 4
"""Vectors that a layer keeps of each token for its gradient: of the hidden size, and of the MLP's width."""
FROZEN = 3
"""Vectors of the MLP's width, if nothing that is trained reads its output."""
DROPPED = 5
"""Bytes of an adapter's input value with dropout: the value in fp32, and the mask."""


@dataclass(frozen=True)
class Step:
    """Bytes of a step, by purpose."""

    weights: float
    trained: float
    """Trained parameters in fp32, with optimizer state."""
    gradients: float
    activations: float
    """Kept from the forward to the backward pass."""
    loss: float
    """While the loss is computed: logits, and the gradients computed with them."""
    layer: float
    """While the gradient of one layer is computed."""

    @property
    def peak(self) -> float:
        """The peak: the loss and the layers follow each other."""
        later = max(self.loss, self.gradients + self.layer)
        return self.weights + self.trained + self.activations + later


def estimate_step(model: Any, asked: Settings) -> Step:
    """Estimate a step of a patched model on a device that holds all of it."""
    size = torch.empty(0, dtype=getattr(torch, asked.model.dtype)).element_size()
    count = estimate_trainable(model, asked.tune)
    lifted = count * size if asked.tune.lora is None else 0  # in place; PEFT trains copies
    kept, layer = activations(model, asked, size)
    return Step(
        weights=sum(p.nbytes for p in model.parameters()) - lifted,
        trained=count * (FULL + MOMENTS.get(asked.train.optim, 2 * FULL)),
        gradients=count * FULL,
        activations=kept,
        loss=loss_bytes(model, asked, size),
        layer=layer,
    )


def activations(model: Any, asked: Settings, size: int) -> tuple[float, float]:
    """Bytes kept for the backward pass, and bytes that it needs for one layer at a time."""
    train, config = asked.train, model.config.get_text_config()
    tokens, hidden, layers = tokens_at_once(asked), config.hidden_size, config.num_hidden_layers
    computed = min(size, 2) if train.bf16 else size
    narrow = NARROW * hidden * size + adapter_inputs(model, asked, size) / layers
    width = getattr(config, "intermediate_size", None) or 4 * hidden
    wide = WIDE * width * computed
    if not train.gradient_checkpointing:
        learned = asked.tune.whole or any(
            layer_sizes(layer)[0] == width for layer in layers_to_adapt(model, asked.tune)
        )
        return layers * tokens * (narrow + (wide if learned else wide * FROZEN / WIDE)), 0
    parts = tokens if train.mlp_tokens is None else min(tokens, train.mlp_tokens)
    attended = 0 if train.recompute_attention else hidden * computed
    waiting = 0 if train.offload else hidden * size
    return layers * tokens * (waiting + attended), tokens * narrow + parts * wide


def adapter_inputs(model: Any, asked: Settings, size: int) -> float:
    """Extra bytes of a token that adapters keep: their input in fp32, and dropout."""
    each = (FULL if size < FULL else 0) + (DROPPED if asked.tune.lora and asked.tune.lora.lora_dropout else 0)
    return each * sum(layer_sizes(layer)[0] for layer in layers_to_adapt(model, asked.tune))


def loss_bytes(model: Any, asked: Settings, size: int) -> float:
    if asked.model.objective == "contrastive":
        return 0
    config, tokens = model.config.get_text_config(), tokens_at_once(asked)
    vocabulary, hidden = config.vocab_size, config.hidden_size
    half = 2 if asked.train.bf16 or size < FULL else 0
    if asked.train.full_logits:
        return float(tokens * vocabulary * (half + 2 * FULL))
    trained = asked.tune.whole or (asked.tune.embeddings and config.tie_word_embeddings)
    of_head = vocabulary * hidden * (half + (FULL if trained else 0))
    return float(min(tokens, rows_at_once(vocabulary)) * vocabulary * (FULL + half) + of_head + tokens * hidden * size)


def tokens_at_once(asked: Settings) -> int:
    return asked.train.per_device_train_batch_size * max(asked.data.lengths)
