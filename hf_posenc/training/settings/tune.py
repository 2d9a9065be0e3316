"""`tune`: what of a model is trained."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from .values import Section


class LoraSettings(Section):
    """Adapters, by PEFT's names."""

    r: int = Field(default=16, gt=0)
    """The rank of adapters."""
    lora_alpha: float = Field(default=32.0, gt=0)
    """What adapters are scaled by, over their rank."""
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    """The share of an adapter's inputs that is dropped in training."""
    target_modules: Literal["attention", "all-linear"] | list[str] = "attention"
    """Projections that get one: those of attention, all of them, or names."""
    use_rslora: bool = False
    """Scale by the root of the rank (rsLoRA), so that high ranks learn as they should."""
    use_dora: bool = False
    """Train the size of each weight's columns apart from their direction (DoRA)."""


class TuneSettings(Section):
    """What is trained. LoRA alone fails at large factors: norms and embeddings belong to it."""

    lora: LoraSettings | None = LoraSettings()
    """Null: what follows is trained by itself."""
    norms: bool = True
    """Train norms too."""
    embeddings: bool = True
    """Train the input embeddings too, and the output layer where it is tied to them."""
    positions: Literal["all", "new", "none"] = "all"
    """The parameters that the scheme brought: all, only rows that the model had not, or none."""
    whole: bool = False
    """Every parameter, instead of all this."""
    learning_rate: float | None = Field(default=None, gt=0)
    """Of norms, embeddings and positions; the adapters' own unless given."""

    @model_validator(mode="before")
    @classmethod
    def whole_is_without_lora(cls, raw: Any) -> Any:
        if isinstance(raw, dict) and raw.get("whole"):
            if raw.get("lora") is not None:
                raise ValueError("whole trains every parameter, and lora would leave them alone: take one of them")
            return {**raw, "lora": None}
        return raw
