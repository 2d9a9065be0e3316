"""Measures whether a runtime computes the same as the patched model."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import PosencError, UnsupportedModel
from ..patching.lengths import trained_length

PROMPTS = 3
"""Prompts at each length."""
LIMITS = {"f32": 1e-3, "f16": 1e-2, "bf16": 3e-2, "q8_0": 5e-2, "q8_0-f16": 5e-2, "quantized": 0.2}
"""The mean Kullback-Leibler divergence in nats that rounding of the weights explains. Below it a runtime computes the
same. A dropped scheme differs by a tenth of a nat or more."""
MARGIN = 8
"""Tokens that a runtime needs for its answer."""

Reader = Callable[[Sequence[Sequence[int]]], list[Tensor]]
"""Prompts -> log-probabilities of the next token after each."""


@dataclass(frozen=True)
class Proof:
    """How much the predictions of a runtime differ from those of the live model."""

    runtime: str
    lengths: tuple[int, ...]
    divergence: tuple[float, ...]
    """Mean Kullback-Leibler divergence in nats, for each length."""
    furthest: float
    """The largest difference of any log-probability."""
    limit: float

    @property
    def holds(self) -> bool:
        return max(self.divergence) < self.limit

    def __str__(self) -> str:
        figures = ", ".join(f"{d:.1e} nats at {n}" for n, d in zip(self.lengths, self.divergence, strict=True))
        verdict = "computes the same" if self.holds else "DIFFERS from the model"
        return f"{self.runtime} {verdict}: {figures} tokens (limit {self.limit:g}, largest {self.furthest:.1e})"

    def write(self, path: Path) -> None:
        path.write_text(json.dumps({**asdict(self), "holds": self.holds}, indent=2) + "\n", encoding="utf-8")


def refuse_images(model: Any) -> None:
    """Raise for a model that does not predict tokens."""
    if getattr(model, "main_input_name", "input_ids") == "pixel_values":
        raise UnsupportedModel(
            f"A {model.config.model_type!r} model reads images: there is no next token to compare. It was loaded "
            "without an error; hf-posenc doctor checks the rest."
        )


def prove(model: Any, read: Reader, runtime: str, dtype: str, given: Sequence[int] | None = None) -> Proof:
    """Compare at the given lengths, or at the trained length and the length in the config."""
    refuse_images(model)
    promised = int(model.config.get_text_config().max_position_embeddings)
    asked = given or (min(trained_length(model), promised), promised)
    lengths = sorted({max(n - MARGIN, 1) for n in asked})
    size = model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(size, (PROMPTS, n), generator=generator) for n in lengths]
    theirs = read([row.tolist() for batch in prompts for row in batch])
    divergences, furthest = [], 0.0
    for index, batch in enumerate(prompts):
        ours = torch.cat([next_token(model, row) for row in batch])
        found = torch.stack(theirs[index * PROMPTS : (index + 1) * PROMPTS])
        if not found.isfinite().all():
            raise PosencError(f"{runtime} gives no probability for {int((~found.isfinite()).sum())} tokens.")
        divergences.append(abs(float((ours.exp() * (ours - found)).sum(-1).mean())))  # rounding can make it negative
        furthest = max(furthest, float((ours - found).abs().max()))
    return Proof(runtime, tuple(lengths), tuple(divergences), furthest, LIMITS.get(dtype, LIMITS["quantized"]))


@torch.no_grad()
def next_token(model: Any, ids: Tensor) -> Tensor:
    """Log-probabilities of the next token after a prompt, (1, vocabulary)."""
    bare = model.get_base_model() if hasattr(model, "get_base_model") else model
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(bare.forward).parameters else {}
    logits: Tensor = model(ids[None].to(model.device), **last).logits[:, -1]
    return logits.float().log_softmax(-1).cpu()
