"""`train`: steps, rates, precision, checkpoints."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from .values import Section


class TrainSettings(Section):
    """Keys and meanings of transformers' TrainingArguments."""

    max_steps: int = Field(gt=0)
    """Steps of the optimizer."""
    max_seconds: float | None = Field(default=None, gt=0)
    """Stop after so long, with the schedule as far as it is: for demonstrations."""
    per_device_train_batch_size: int = Field(default=1, gt=0)
    """Rows that a device reads at once."""
    gradient_accumulation_steps: int = Field(default=1, gt=0)
    """How many such batches make a step."""
    learning_rate: float = Field(default=2e-4, gt=0)
    """The largest rate."""
    lr_scheduler_type: Literal["constant_with_warmup", "cosine", "linear", "constant"] = "constant_with_warmup"
    """How the rate goes on after it has warmed up."""
    warmup_steps: int = Field(default=20, ge=0)
    """20, or half of the steps where they are few, unless given."""
    weight_decay: float = Field(default=0.0, ge=0)
    """By how much weights shrink."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """How long Adam remembers gradients."""
    adam_beta2: float = Field(default=0.95, ge=0, lt=1)
    """How long it remembers their squares."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Gradients larger than this are scaled down to it; 0: never."""
    bf16: bool = False
    """Compute in bfloat16 by autocast, where the model is held in float32."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them, but for what attention gave."""
    recompute_attention: bool = False
    """That as well: less memory, more time."""
    mlp_tokens: int | None = Field(default=None, gt=0)
    """Take the MLP of a row in parts of so many tokens: for rows whose MLP is what does not fit."""
    offload: bool = False
    """Keep the inputs of recomputed layers in the memory of the host."""
    logging_steps: int = Field(default=10, gt=0)
    """Tell the loss every so many steps."""
    save_steps: int = Field(default=100, gt=0)
    """Write a checkpoint every so many steps."""
    save_total_limit: int = Field(default=2, ge=2)
    """At least two, so that there is one to go back to when the newest is damaged."""
    report_to: Literal["none", "tensorboard", "wandb"] = "none"
    """Who else is told. wandb must be installed by itself."""
    optim: Literal[
        "adamw_torch", "adamw_torch_fused", "adamw_torch_8bit", "adamw_8bit", "paged_adamw_8bit", "adafactor"
    ] = "adamw_torch_fused"
    """`adamw_torch_8bit` needs torchao, `adamw_8bit` and `paged_adamw_8bit` bitsandbytes."""
    eval_steps: int | None = Field(default=None, gt=0)
    """Take the loss of rows that are held out every so many steps."""
    eval_rows: int = Field(default=16, gt=0)
    """How many rows that is."""
    load_best_model_at_end: bool = False
    """Keep the checkpoint with the lowest such loss, and end with it."""
    early_stopping_patience: int | None = Field(default=None, gt=0)
    """Stop when it did not fall so many times in a row."""
    generate_steps: int | None = Field(default=None, gt=0)
    """Continue texts of the target length every so many steps, and show what is written."""
    use_cpu: bool | None = None
    """Train on the CPU; where nothing else is found, unless given."""
    seed: int = 0
    """Of everything that is drawn."""
    full_logits: bool = False
    """Let the model compute its loss from all logits at once, which takes far more memory."""
    processes: int | None = Field(default=None, gt=0)
    """Refuse to start unless so many processes share the work."""

    @model_validator(mode="after")
    def looks_before_it_judges(self) -> TrainSettings:
        judging = [key for key in ("load_best_model_at_end", "early_stopping_patience") if getattr(self, key)]
        if judging and self.eval_steps is None:
            raise ValueError(f"{judging[0]} goes by the loss of rows that are held out: set eval_steps")
        if self.load_best_model_at_end and self.save_steps % (self.eval_steps or 1):
            raise ValueError(
                f"the best of the checkpoints is looked for: save_steps {self.save_steps} must be a multiple of "
                f"eval_steps {self.eval_steps}"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def few_steps(cls, raw: Any) -> Any:
        steps = raw.get("max_steps") if isinstance(raw, dict) else None
        return {"warmup_steps": min(20, steps // 2), **raw} if type(steps) is int and steps > 0 else raw

    @model_validator(mode="after")
    def recomputes_what_it_must(self) -> TrainSettings:
        asked = [key for key in ("recompute_attention", "mlp_tokens", "offload") if getattr(self, key)]
        if asked and not self.gradient_checkpointing:
            raise ValueError(f"{asked[0]} is a part of gradient_checkpointing: set it")
        return self

    @model_validator(mode="after")
    def warms_up_in_time(self) -> TrainSettings:
        if self.warmup_steps > self.max_steps:
            raise ValueError(
                f"warmup_steps {self.warmup_steps} exceed max_steps {self.max_steps}: the rate would never be reached"
            )
        return self
