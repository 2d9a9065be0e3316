"""transformers' Trainer with a loss that needs few logits in memory, and verified checkpoints."""

from __future__ import annotations

import contextlib
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils import DistributedType
from torch import Tensor
from transformers import TrainingArguments
from transformers.trainer import TRAINING_ARGS_NAME

from ..checkpoints.tied import write_once
from ..compat.trainers import WatchedTrainer
from ..errors import PosencError
from ..patching.fingerprint import fingerprint
from ..patching.sidecar import ADAPTER, seal_adapter
from .callbacks import ThroughputMeter
from .contrastive import contrastive_loss
from .loss import LossHead, Wanted, shift_labels
from .manifest import write_manifest
from .master_weights import rounded_dtypes, rounded_state
from .memory import recompute
from .resume import Clock
from .rows import IGNORED, collate
from .settings import Settings
from .sharding import prepare_shared_text, processes_per_text, refuse_lost_rows, refuse_sharded_text, unsplit_inputs

SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED)
DAY = 86_400
OURS = {
    "max_seconds", "full_logits", "processes", "use_cpu", "gradient_checkpointing", "recompute_attention",
    "mlp_tokens", "offload", "eval_rows", "early_stopping_patience", "generate_steps",
}  # fmt: skip
"""Keys of `train` that are not passed to TrainingArguments."""


def arguments(settings: Settings) -> TrainingArguments:
    asked = settings.train
    on_cpu = not torch.accelerator.is_available() if asked.use_cpu is None else asked.use_cpu
    given: dict[str, Any] = dict(
        use_cpu=on_cpu,
        eval_strategy="no" if asked.eval_steps is None else "steps",
        per_device_eval_batch_size=asked.per_device_train_batch_size,
        prediction_loss_only=True,
        metric_for_best_model="loss" if asked.eval_steps is not None else None,
        train_sampling_strategy="sequential",  # rows are in order already
        remove_unused_columns=False,
        save_strategy="steps",
        restore_callback_states_from_checkpoint=True,  # keeps the patience of early stopping
        logging_first_step=True,
        dataloader_pin_memory=not on_cpu,
        ddp_find_unused_parameters=False,
        ddp_timeout=DAY,  # other processes wait while one measures
    )
    try:
        return TrainingArguments(output_dir=settings.output, **asked.model_dump(exclude=OURS), **given)
    except ValueError as error:  # for example a precision that the device does not have
        raise PosencError(f"train: {error}") from error


def rows_a_step(args: TrainingArguments) -> int:
    """Rows of one step. Processes that share a text count once."""
    sharing = int(os.environ.get("PARALLELISM_CONFIG_CP_SIZE", 1))
    return args.world_size // sharing * args.per_device_train_batch_size * args.gradient_accumulation_steps


class ContextTrainer(WatchedTrainer):
    """Trains on rows of tokens. The loss is the mean over all tokens of a step."""

    def __init__(
        self,
        *,
        settings: Settings,
        head: LossHead | None,
        other_rate: float | None = None,
        clock: Clock | None = None,
        **kwargs: Any,
    ):
        super().__init__(data_collator=collate, **kwargs)
        self.settings, self.head, self.other_rate = settings, head, other_rate
        self.clock = clock or Clock()
        self.rounding = False
        adapted: Any = self.model
        self.base_weights = fingerprint(adapted.get_base_model()) if hasattr(adapted, "peft_config") else {}
        self.causal = settings.model.objective == "causal"
        self.next_token = self.causal
        self.contrastive = settings.model.objective == "contrastive"
        self.model_accepts_loss_kwargs = not self.contrastive  # makes transformers count the tokens of a whole step
        parallel = getattr(self.accelerator, "parallelism_config", None)
        refuse_sharded_text(settings, parallel, self.train_dataset)
        refuse_lost_rows(settings, self.accelerator.distributed_type in SHARDED)
        self.sharing = processes_per_text(parallel)
        if self.sharing > 1:
            prepare_shared_text(self.model)
        self.meter = ThroughputMeter(self.accelerator.num_processes // self.sharing)
        if settings.train.gradient_checkpointing:
            recompute(self.model, settings.train)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        super().log({**logs, **self.meter.read()} if "loss" in logs else logs, *args, **kwargs)

    def shared_inputs(self, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """transformers checks only the name of the attention; `prepare_shared_text` has checked the rest."""
        if self.sharing == 1:
            return contextlib.nullcontext, inputs
        inputs = unsplit_inputs(inputs)
        parts = list(inputs.values())
        dimensions = [1] * len(parts)
        cut = partial(self.accelerator.maybe_context_parallel, parts, dimensions, no_restore_buffers=set(parts))
        return cut, inputs

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        padding = inputs.pop("padding", None)
        if model.training:
            self.meter.count(inputs["input_ids"].numel(), 0 if padding is None else int(padding.sum()))
        if self.contrastive:
            loss = contrastive_loss(model, inputs)
            return (loss, None) if return_outputs else loss
        labels, answers = inputs.pop("labels", None), inputs.pop("answers", None)
        targets = inputs.pop("shift_labels", None)
        if targets is None:
            targets = shift_labels(labels) if self.causal else labels
        if answers is not None:
            answers = F.pad(answers[:, 1:], (0, 1))
        wanted = Wanted(targets, answers, self.settings.data.answer_weight)
        if self.causal:
            inputs["use_cache"] = False  # with a cache transformers does not look for document boundaries
        if self.head is not None:
            with self.head.expecting(wanted):
                outputs = model(**inputs)
            total = outputs.logits.sum()
        else:
            outputs = model(**inputs)
            total = sum_losses(outputs.logits, wanted)
        count = (targets != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
        loss = total / count
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            loss = loss * (self.accelerator.num_processes // self.get_tp_size())
        return (loss, outputs) if return_outputs else loss

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None and self.other_rate is not None:
            chosen: Any = self.model if model is None else model
            named = [(name, p) for name, p in chosen.named_parameters() if p.requires_grad]
            groups = [
                {"params": [p for n, p in named if "lora_" in n], "weight_decay": self.args.weight_decay},
                {"params": [p for n, p in named if "lora_" not in n], "weight_decay": 0.0, "lr": self.other_rate},
            ]
            kind, options = self.get_optimizer_cls_and_kwargs(self.args, chosen)
            self.optimizer = kind([group for group in groups if group["params"]], **options)
        return super().create_optimizer(model)

    def write(self, folder: Path) -> None:
        """Save the result, with master weights rounded to the model's dtype. Checkpoints keep them in fp32."""
        self.rounding = True
        try:
            self.save_model(str(folder))
        finally:
            self.rounding = False
        if not self.args.should_save:
            return
        (folder / TRAINING_ARGS_NAME).unlink(missing_ok=True)  # a pickle file; recipe.yaml has the same settings
        model = self.accelerator.unwrap_model(self.model)
        if hasattr(model, "peft_config"):
            write_once(folder, model.get_base_model())

    @property
    def saved_dtypes(self) -> dict[str, str]:
        """The dtypes that adapters and other weights are saved in."""
        model = self.accelerator.unwrap_model(self.model)
        rounded = rounded_dtypes(model)
        found: dict[str, str] = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                kind = "adapters" if "lora_" in name else "weights"
                found[kind] = str(rounded.get(name, parameter.dtype)).removeprefix("torch.")
        return dict(sorted(found.items()))

    def state_to_save(self, state: Any) -> Any:
        return rounded_state(self.accelerator.unwrap_model(self.model), state) if self.rounding else state

    def after_save(self, folder: Path) -> None:
        model = self.accelerator.unwrap_model(self.model)
        if not hasattr(model, "peft_config"):
            return
        if getattr(model.config, "posenc", None) is not None:
            seal_adapter(folder, model.get_base_model(), self.base_weights)  # sharded saves do not call our hooks
        # PEFT writes the path of the base model, which for `tiny` is a path on this machine.
        config = folder / ADAPTER
        noted = {**json.loads(config.read_text()), "base_model_name_or_path": self.settings.model.path}
        config.write_text(json.dumps(noted, indent=2, sort_keys=True) + "\n")

    def after_checkpoint(self, folder: Path) -> None:
        self.accelerator.wait_for_everyone()  # so that every process has written its random state
        if self.args.should_save:
            self.clock.now().write(folder)
            write_manifest(folder, self.settings.of_run())


def sum_losses(logits: Tensor, wanted: Wanted) -> Tensor:
    """The same sum from whole logits."""
    assert wanted.targets is not None
    losses = F.cross_entropy(
        logits.float().flatten(0, 1), wanted.targets.flatten(), reduction="none", ignore_index=IGNORED
    )
    return losses.sum() if wanted.token_weights is None else (losses * wanted.token_weights).sum()
