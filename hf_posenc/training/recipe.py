"""Run a recipe: from a model and text to an adapter or a model, with its results and its card.

1. `prepare` loads the model and the text, patches, and refuses everything that would fail later.
2. `measure_before` measures the unpatched and the patched model.
3. `train_and_save` chooses the trainable parameters, trains and saves them.
4. `finish` loads what was saved, measures it, and writes the card.
"""

from __future__ import annotations

import gc
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import PartialState
from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments, set_seed

from ..errors import PosencError
from ..evaluation.measures.rows import Row as Figure
from ..families import places
from ..patching.patch import unpatch_model
from ..patching.sizes import config_length
from .callbacks import Generations, StopInTime
from .card import command, versions
from .checks import (
    refuse_absent_packages,
    refuse_full_disk,
    refuse_generations,
    refuse_merging,
    refuse_misfit,
    refuse_other_base,
    refuse_other_head,
    refuse_other_launch,
    refuse_output,
    refuse_recomputing,
    refuse_small_batches,
    refuse_targets,
)
from .loss import LossHead
from .outputs import finish
from .preparation import (
    held_out_rows,
    make_measurement,
    make_model,
    patch,
    positions_name,
    positions_record,
    source_names,
    training_rows,
)
from .resume import Clock, Past, console, find_checkpoint
from .settings import Settings
from .sharding import (
    launcher_parallelism,
    launcher_shards,
    prepare_shared_text,
    processes_per_text,
    refuse_lost_rows,
    refuse_sharded_bits,
    refuse_sharded_text,
    refuse_zero3,
)
from .sources import load_corpora, refuse_missing_files
from .trainer import ContextTrainer, arguments, rows_a_step
from .tuning import choose_trainable, count_trainable, estimate_trainable

CONTROL = "control"
"""The folder of the control, inside the output folder of its run."""


@dataclass
class Run:
    """Everything that a run needs, patched and checked."""

    settings: Settings
    args: TrainingArguments
    model: Any
    tokenizer: Any
    rows: Any
    held_out: Any
    """Rows to measure the loss on while training, if any."""
    measure: Any
    data: str
    """The names of the texts."""
    trained_length: int
    parameters: int
    begin: Path | None
    """The checkpoint to resume from."""
    clock: Clock
    came_patched: bool

    @property
    def is_main(self) -> bool:
        return bool(self.args.process_index == 0)

    @property
    def output(self) -> Path:
        return Path(self.settings.output)


def train(
    settings: Settings, resume: bool = False, merged: bool = False, compared: bool = True, control: bool = False
) -> list[Figure]:
    """Run a recipe, and return its results. Unless `compared`, only the trained model is measured.

    With `control` the unpatched model is trained on the same rows first, and its results are added.
    """
    run = prepare(settings, resume, merged)
    beside: list[Figure] = []
    if control:
        del run  # prepared first for its checks, so that the control is not trained for nothing
        beside = train(control_settings(settings), resume=resume, compared=False)
        run = prepare(settings, resume, merged)
    run.output.mkdir(parents=True, exist_ok=True)
    if run.is_main:
        (run.output / "recipe.yaml").write_text(yaml.safe_dump(settings.model_dump(), sort_keys=False))
    figures = measure_before(run) if compared and settings.measure.before else []
    folder, facts = train_and_save(run)
    if run.is_main:
        figures += beside
        finish(settings, folder, merged, figures, run.measure, facts, run.args.device)
    PartialState().wait_for_everyone()
    return figures


def prepare(settings: Settings, resume: bool = False, merged: bool = False) -> Run:
    """Load and check everything that a run needs, before anything is trained, measured or written."""
    clock = Clock()
    refuse_output(settings)
    refuse_absent_packages(settings)
    refuse_missing_files(settings.data)  # before the model, which may take minutes to load
    refuse_zero3()
    args = arguments(settings)  # from here on the launched processes know of each other
    refuse_other_launch(settings, args.world_size, int(os.environ.get("WORLD_SIZE", 1)))
    refuse_small_batches(settings, args.world_size)
    begin = find_checkpoint(settings, resume)
    clock.past, clock.command = Past.of(begin), command()

    model, tokenizer = make_model(settings)
    trained_length = config_length(places(model)) or settings.data.length
    came = positions_record(model)
    parameters = model.num_parameters()
    patch(settings, model)
    refuse_other_base(settings, came, positions_record(model))
    refuse_merging(settings, merged, came)
    refuse_misfit(settings, model, tokenizer)
    refuse_targets(settings, model)
    refuse_recomputing(settings, model, args.device.type)
    refuse_full_disk(settings, estimate_trainable(model, settings.tune), parameters, merged)
    refuse_lost_rows(settings, launcher_shards())
    refuse_sharded_bits(settings, launcher_shards())
    if processes_per_text(launcher_parallelism()) > 1:
        prepare_shared_text(model)

    texts = load_corpora(settings.data)
    measure = make_measurement(settings, texts, tokenizer, trained_length)
    rows = training_rows(settings, texts, tokenizer, rows_a_step(args))
    looked_at = held_out_rows(settings, texts, tokenizer) if settings.train.eval_steps else None
    refuse_generations(settings, measure.keywords["documents"], launcher_shards())
    refuse_sharded_text(settings, launcher_parallelism(), rows)
    refuse_other_head(settings, model, rows)
    return Run(
        settings, args, model, tokenizer, rows, looked_at, measure, source_names(texts), trained_length, parameters,
        begin, clock, came is not None,
    )  # fmt: skip


def measure_before(run: Run) -> list[Figure]:
    """Results of the model before training, unpatched and patched. A resumed run reads them from its folder."""
    if not run.is_main:
        return []
    file = run.output / "before.json"
    if file.exists():
        return [Figure.from_dict(row) for row in json.loads(file.read_text())]
    settings, model = run.settings, run.model.to(run.args.device)
    found: list[Figure] = []
    if settings.scheme.name is not None and run.came_patched:  # the patched checkpoint must be loaded again
        original, _ = make_model(settings)
        found += run.measure(original.to(run.args.device), label=positions_name(original) + ", as it came")
        del original
    elif settings.scheme.name is not None:
        unpatch_model(model)
        found += run.measure(model, label="unpatched")
        patch(settings, model)
    found += run.measure(model, label=positions_name(model))
    beside = file.with_suffix(".part")
    beside.write_text(json.dumps([figure.to_dict() for figure in found]))
    beside.replace(file)  # so that an interrupted run leaves the whole file or none
    return found


def train_and_save(run: Run) -> tuple[Path, dict[str, Any]]:
    """Train and save; return the folder and the facts of the run. The model is freed."""
    trainer = make_trainer(run)
    if run.is_main:
        share = f"{count_trainable(trainer.model):,} of {run.parameters:,}"
        console.print(f"{share} parameters are trained, by {run.args.world_size} process(es).", soft_wrap=True)
    run.clock.training = time.monotonic()
    trainer.train(resume_from_checkpoint=None if run.begin is None else str(run.begin))
    folder = run.output / ("adapter" if hasattr(trainer.model, "peft_config") else "model")
    trainer.write(folder)
    facts = run_facts(run, trainer)  # in all processes, since parameters may be sharded
    run.model = None
    del trainer
    gc.collect()
    if run.args.device.type == "cuda":
        torch.cuda.empty_cache()
    return folder, facts


def make_trainer(run: Run) -> ContextTrainer:
    """The trainer of a run."""
    settings = run.settings
    set_seed(settings.train.seed)  # adapters start at random, the same in all processes
    wrapped = choose_trainable(run.model, settings.tune, settings.model.objective)
    whole = settings.train.full_logits or settings.model.objective == "contrastive"
    return ContextTrainer(
        settings=settings, head=None if whole else LossHead(run.model), other_rate=settings.tune.learning_rate,
        clock=run.clock, model=wrapped, args=run.args, train_dataset=run.rows, eval_dataset=run.held_out,
        processing_class=run.tokenizer, callbacks=callbacks(run),
    )  # fmt: skip


def callbacks(run: Run) -> list[TrainerCallback]:
    """The callbacks that the settings ask for."""
    asked, found = run.settings.train, list[TrainerCallback]()
    if asked.max_seconds is not None:
        found.append(StopInTime(asked.max_seconds))
    if asked.early_stopping_patience is not None:
        found.append(EarlyStoppingCallback(asked.early_stopping_patience))
    if asked.generate_steps is not None:
        documents = run.measure.keywords["documents"]
        found.append(Generations(documents, run.tokenizer, run.settings.data.reach, asked.generate_steps, run.output))
    return found


def run_facts(run: Run, trainer: ContextTrainer) -> dict[str, Any]:
    """The facts of a run, over all times it was resumed, for its metrics and its card."""
    past, settings = run.clock.now(), run.settings.train
    losses = [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    return {
        "steps": trainer.state.global_step,
        "tokens": run.rows.plan.tokens(trainer.state.global_step * rows_a_step(run.args)),
        "seconds": past.seconds,
        "training_seconds": past.training_seconds,
        "losses": losses,
        "best_step": trainer.state.best_global_step if settings.load_best_model_at_end else None,
        "held_out_losses": [(e["step"], e["eval_loss"]) for e in trainer.state.log_history if "eval_loss" in e],
        "trained": count_trainable(trainer.model),
        "parameters": run.parameters,
        "written": trainer.saved_dtypes,
        "processes": run.args.world_size,
        "distributed": str(trainer.accelerator.distributed_type),
        "commands": past.commands,
        "command": past.commands[0],
        "data": run.data,
        "trained_length": run.trained_length,
        "versions": versions(),
    }


def control_settings(settings: Settings) -> Settings:
    """The same run without a scheme."""
    if settings.scheme.name is None:
        raise PosencError("--control trains the unpatched model for comparison, but this recipe names no scheme.")
    raw = settings.model_dump()
    output = str(Path(settings.output) / CONTROL)
    return Settings.model_validate({**raw, "scheme": {}, "output": output})
