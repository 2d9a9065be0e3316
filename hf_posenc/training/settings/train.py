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
    """Stop after so many seconds, wherever the learning rate schedule is. Meant for demonstrations."""
    per_device_train_batch_size: int = Field(default=1, gt=0)
    """Rows in a batch on each device."""
    gradient_accumulation_steps: int = Field(default=1, gt=0)
    """Batches in a step."""
    learning_rate: float = Field(default=2e-4, gt=0)
    """The highest learning rate."""
    lr_scheduler_type: Literal["constant_with_warmup", "cosine", "linear", "constant"] = "constant_with_warmup"
    """The learning rate schedule after warm-up."""
    warmup_steps: int = Field(default=20, ge=0)
    """Steps of warm-up. By default 20, or half of the steps if there are fewer than 40."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of Adam's first moment."""
    adam_beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of Adam's second moment."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Gradients are clipped to this norm; 0: never."""
    bf16: bool = False
    """Compute in bfloat16 by autocast, with the model in float32."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them, except the output of attention."""
    recompute_attention: bool = False
    """Recompute the output of attention too: less memory, more time."""
    mlp_tokens: int | None = Field(default=None, gt=0)
    """Run the MLPs on so many tokens at a time, for rows whose MLP activations do not fit into memory."""
    offload: bool = False
    """Keep the inputs of recomputed layers in CPU memory."""
    logging_steps: int = Field(default=10, gt=0)
    """Log the loss every so many steps."""
    save_steps: int = Field(default=100, gt=0)
    """Write a checkpoint every so many steps."""
    save_total_limit: int = Field(default=2, ge=2)
    """Checkpoints to keep. At least two, to go back to one if the newest is damaged."""
    report_to: Literal["none", "tensorboard", "wandb"] = "none"
    """Where else to log. wandb must be installed separately."""
    optim: Literal[
        "adamw_torch", "adamw_torch_fused", "adamw_torch_8bit", "adamw_8bit", "paged_adamw_8bit", "adafactor"
    ] = "adamw_torch_fused"
    """The optimizer. `adamw_torch_8bit` needs torchao, `adamw_8bit` and `paged_adamw_8bit` bitsandbytes."""
    eval_steps: int | None = Field(default=None, gt=0)
    """Measure the loss on held-out rows every so many steps."""
    eval_rows: int = Field(default=16, gt=0)
    """Number of held-out rows."""
    load_best_model_at_end: bool = False
    """Keep the checkpoint with the lowest held-out loss, and load it at the end."""
    early_stopping_patience: int | None = Field(default=None, gt=0)
    """Stop when the held-out loss has not fallen so many times in a row."""
    generate_steps: int | None = Field(default=None, gt=0)
    """Generate continuations of texts of the target length every so many steps, and print them."""
    use_cpu: bool | None = None
    """Train on the CPU; by default only if there is no accelerator."""
    seed: int = 0
    """Random seed."""
    full_logits: bool = False
    """Compute the loss from all logits at once, which needs far more memory."""
    processes: int | None = Field(default=None, gt=0)
    """Refuse to start unless so many processes run."""

    @model_validator(mode="after")
    def looks_before_it_judges(self) -> TrainSettings:
        judging = [key for key in ("load_best_model_at_end", "early_stopping_patience") if getattr(self, key)]
        if judging and self.eval_steps is None:
            raise ValueError(f"{judging[0]} depends on the loss of held-out rows: set eval_steps")
        if self.load_best_model_at_end and self.save_steps % (self.eval_steps or 1):
            raise ValueError(
                f"only saved checkpoints can be the best one: save_steps {self.save_steps} must be a multiple of "
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
            raise ValueError(f"{asked[0]} needs gradient_checkpointing: set it to true")
        return self

    @model_validator(mode="after")
    def warms_up_in_time(self) -> TrainSettings:
        if self.warmup_steps > self.max_steps:
            raise ValueError(
                f"warmup_steps {self.warmup_steps} exceed max_steps {self.max_steps}: the rate would never be reached"
            )
        return self
