"""What a training step holds in memory, about: from the shape of the model, and how its rows are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .loss import rows_at_once
from .settings import Settings
from .tuning import adapted_layers, estimate_trainable, layer_sizes

FULL = 4
"""Bytes of a value in fp32, as what is trained is held and its gradients are."""
MOMENTS = {"adamw_torch_8bit": 2, "adamw_8bit": 2, "paged_adamw_8bit": 2, "adafactor": 0}
"""Bytes that an optimizer keeps of each value, where it is not Adam's two moments in fp32."""
NARROW, WIDE = 12, 4
"""Vectors of a token that a layer keeps for its gradient: as wide as its input, and as its MLP."""
FROZEN = 3
"""Of the latter where nothing that is trained reads what comes of them."""
DROPPED = 5
"""Bytes of an input that an adapter drops a share of: what is left of it in fp32, and which values these are."""


@dataclass(frozen=True)
class Step:
    """Bytes of a step, by what they are for."""

    weights: float
    trained: float
    """What is trained, in fp32, with its moments."""
    gradients: float
    activations: float
    """From the forward to the backward pass."""
    loss: float
    """While it is taken: the most logits, and the gradients that are taken with them."""
    layer: float
    """While its gradient is taken."""

    @property
    def peak(self) -> float:
        """The loss and the layers come one after the other."""
        later = max(self.loss, self.gradients + self.layer)
        return self.weights + self.trained + self.activations + later


def estimate_step(model: Any, asked: Settings) -> Step:
    """A step of a patched model, on a device that holds all of it."""
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
    """What is kept for the backward pass, and what it computes of one layer at a time."""
    train, config = asked.train, model.config.get_text_config()
    tokens, hidden, layers = tokens_at_once(asked), config.hidden_size, config.num_hidden_layers
    computed = min(size, 2) if train.bf16 else size
    narrow = NARROW * hidden * size + adapter_inputs(model, asked, size) / layers
    width = getattr(config, "intermediate_size", None) or 4 * hidden
    wide = WIDE * width * computed
    if not train.gradient_checkpointing:
        learned = asked.tune.whole or any(
            layer_sizes(layer)[0] == width for layer in adapted_layers(model, asked.tune)
        )
        return layers * tokens * (narrow + (wide if learned else wide * FROZEN / WIDE)), 0
    parts = tokens if train.mlp_tokens is None else min(tokens, train.mlp_tokens)
    attended = 0 if train.recompute_attention else hidden * computed
    waiting = 0 if train.offload else hidden * size
    return layers * tokens * (waiting + attended), tokens * narrow + parts * wide


def adapter_inputs(model: Any, asked: Settings, size: int) -> float:
    """Bytes of a token that adapters keep beside what they adapt keeps: they read in fp32, and may drop a share."""
    each = (FULL if size < FULL else 0) + (DROPPED if asked.tune.lora and asked.tune.lora.lora_dropout else 0)
    return each * sum(layer_sizes(layer)[0] for layer in adapted_layers(model, asked.tune))


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
