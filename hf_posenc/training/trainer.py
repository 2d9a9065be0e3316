"""transformers' Trainer, with a loss that holds few logits and checkpoints that can be trusted."""

from __future__ import annotations

import contextlib
import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments

from ..compat.trainers import WatchedTrainer
from ..errors import PosencError
from ..patching.sidecar import write_record
from .contrastive import contrastive_loss
from .loss import LossHead, Wanted, shifted
from .manifest import write_manifest
from .rows import IGNORED, together
from .settings import Settings
from .sharding import refuse_lost_rows, refuse_sharded_text, share_text, sharing, whole_text


def arguments(settings: Settings) -> TrainingArguments:
    asked = settings.train
    own = {"max_seconds", "full_logits", "processes", "use_cpu"}
    on_cpu = not torch.accelerator.is_available() if asked.use_cpu is None else asked.use_cpu
    return TrainingArguments(
        output_dir=settings.output,
        **asked.model_dump(exclude=own),
        use_cpu=on_cpu,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        train_sampling_strategy="sequential",  # rows come in the order of their run, whoever reads them
        remove_unused_columns=False,
        save_strategy="steps",
        logging_first_step=True,
        dataloader_pin_memory=not on_cpu,
        ddp_find_unused_parameters=False,
    )


def rows_a_step(args: TrainingArguments) -> int:
    """Rows that one step takes from the data. Processes that share one text count once."""
    sharing = int(os.environ.get("PARALLELISM_CONFIG_CP_SIZE", 1))
    return args.world_size // sharing * args.per_device_train_batch_size * args.gradient_accumulation_steps


class ContextTrainer(WatchedTrainer):
    """Trains on rows of tokens. The loss is a sum over tokens, divided by those of the whole step."""

    def __init__(self, *, settings: Settings, head: LossHead | None, other_rate: float | None, **kwargs: Any):
        super().__init__(data_collator=together, **kwargs)
        self.settings, self.head, self.other_rate = settings, head, other_rate
        self.causal = settings.model.objective == "causal"
        self.next_token = self.causal
        self.contrastive = settings.model.objective == "contrastive"
        self.model_accepts_loss_kwargs = not self.contrastive  # so that the tokens of a whole step are counted
        refuse_sharded_text(settings, self)
        refuse_lost_rows(settings, self.accelerator)
        self.sharing = sharing(self.accelerator)
        if self.sharing > 1:
            share_text(self.model)

    def shared_inputs(self, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """transformers goes by the name of the attention alone; `share_text` has looked at what it does."""
        if self.sharing == 1:
            return contextlib.nullcontext, inputs
        inputs = whole_text(inputs)
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
        if self.contrastive:
            return contrastive_loss(model, inputs)
        labels, answers = inputs.pop("labels", None), inputs.pop("answers", None)
        targets = inputs.pop("shift_labels", None)
        if targets is None:
            targets = shifted(labels) if self.causal else labels
        if answers is not None:
            answers = F.pad(answers[:, 1:], (0, 1))
        wanted = Wanted(targets, answers, self.settings.data.answer_weight)
        if self.causal:
            inputs["use_cache"] = False  # with a cache transformers does not look for borders
        if self.head is not None:
            with self.head.expecting(wanted):
                outputs = model(**inputs)
            total = outputs.logits.sum()
        else:
            outputs = model(**inputs)
            total = summed(outputs.logits, wanted)
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

    def saved(self, folder: Path) -> None:
        model = self.accelerator.unwrap_model(self.model)
        if not hasattr(model, "peft_config"):
            return
        record = getattr(model.config, "posenc", None)
        if record is not None:
            write_record(folder, record)  # sharded saves do not pass our hooks
        # PEFT notes where a base model was found, which for one of this package is a place on this machine.
        config = folder / "adapter_config.json"
        noted = {**json.loads(config.read_text()), "base_model_name_or_path": self.settings.model.path}
        config.write_text(json.dumps(noted, indent=2, sort_keys=True) + "\n")

    def checkpointed(self, folder: Path) -> None:
        self.accelerator.wait_for_everyone()  # every process has written its random state
        if self.args.should_save:
            write_manifest(folder, self.settings.of_run())


def summed(logits: Tensor, wanted: Wanted) -> Tensor:
    """The same sum from logits that are all there."""
    assert wanted.targets is not None
    losses = F.cross_entropy(
        logits.float().flatten(0, 1), wanted.targets.flatten(), reduction="none", ignore_index=IGNORED
    )
    if wanted.answers is not None:
        losses = losses * torch.where(wanted.answers.flatten(), wanted.weight, 1.0)
    return losses.sum()


class StopInTime(TrainerCallback):
    """Ends training after so many seconds."""

    def __init__(self, seconds: float):
        self.seconds, self.begun = seconds, time.monotonic()

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.begun = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if time.monotonic() - self.begun > self.seconds:
            control.should_training_stop = True
        return control


def refuse_other_launch(settings: Settings, trainer: Trainer, world: int) -> None:
    """Raise where fewer processes share the work than were meant to: launchers run one, or copies, without a word."""
    found = trainer.accelerator.num_processes
    wanted = settings.train.processes
    if world != found:
        raise PosencError(
            f"{world} processes were launched, and each believes to be one of {found}: they would all train the same. "
            "On CPUs launch with --config_file recipes/accelerate/cpu.yaml."
        )
    if wanted is not None and wanted != found:
        raise PosencError(
            f"train.processes is {wanted}, and {found} are running. accelerate runs one where it is told --cpu or "
            "MULTI_CPU: launch with --config_file recipes/accelerate/cpu.yaml and --num_processes."
        )


def refuse_small_batches(settings: Settings, trainer: Trainer) -> None:
    """Raise where a contrastive batch has nothing to tell apart, or is spread over processes."""
    if settings.model.objective != "contrastive":
        return
    if settings.train.per_device_train_batch_size < 2 or trainer.accelerator.num_processes > 1:
        raise PosencError(
            "model.objective: contrastive tells the rows of one batch apart: it takes one process and "
            "train.per_device_train_batch_size from 2 up."
        )
