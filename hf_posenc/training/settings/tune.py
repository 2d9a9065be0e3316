"""`tune`: which parameters are trained."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from .values import Section


class LoraSettings(Section):
    """LoRA adapters, with PEFT's names."""

    r: int = Field(default=16, gt=0)
    """Rank of the adapters."""
    lora_alpha: float = Field(default=32.0, gt=0)
    """Adapters are scaled by this over their rank."""
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the inputs of adapters."""
    target_modules: Literal["attention", "all-linear"] | list[str] = "attention"
    """Projections that get adapters: those of attention, all linear layers, or names."""
    use_rslora: bool = False
    """Scale by the square root of the rank (rsLoRA), which helps high ranks."""
    use_dora: bool = False
    """Train the magnitude of weights separately from their direction (DoRA)."""


class TuneSettings(Section):
    """Which parameters are trained. LoRA alone fails at large factors: train norms and embeddings too."""

    lora: LoraSettings | None = LoraSettings()
    """Null: no adapters, only the parameters chosen below."""
    norms: bool = True
    """Train norms too."""
    embeddings: bool = True
    """Train the input embeddings too, and the output layer where it is tied to them."""
    positions: Literal["all", "new", "none"] = "all"
    """Train the parameters that the scheme added: all, only new rows of tables, or none."""
    whole: bool = False
    """Train every parameter instead."""
    learning_rate: float | None = Field(default=None, gt=0)
    """Learning rate of norms, embeddings and positions; by default that of the adapters."""

    @model_validator(mode="before")
    @classmethod
    def whole_is_without_lora(cls, raw: Any) -> Any:
        if isinstance(raw, dict) and raw.get("whole"):
            if raw.get("lora") is not None:
                raise ValueError("whole trains every parameter, and lora would leave them alone: take one of them")
            return {**raw, "lora": None}
        return raw
