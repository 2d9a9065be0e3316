"""Checks of a run before anything is measured or trained."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..errors import PosencError, suggestion
from ..evaluation.measures.texts import Document
from ..extras import missing_package
from ..families import places
from ..patching.describe import describe
from ..patching.patch_state import is_patched
from ..patching.records import Record
from ..patching.sizes import config_length
from .loss import LossHead, refuse_other_loss
from .memory import plain_mlps
from .recipe_files import launch_option
from .rows import collate
from .settings import Settings
from .tuning import lora_targets, whole_modules

GB = 1e9
PACKAGES = {
    ("model", "quantize"): {"nf4": "bitsandbytes", "fp4": "bitsandbytes"},
    ("train", "report_to"): {"tensorboard": "tensorboard", "wandb": "wandb"},
    ("train", "optim"): {
        "adamw_torch_8bit": "torchao",
        "adamw_8bit": "bitsandbytes",
        "paged_adamw_8bit": "bitsandbytes",
    },
}
"""Packages that values of keys need."""


def refuse_output(settings: Settings) -> None:
    """Raise if the output folder cannot be written."""
    output = Path(settings.output).absolute()
    lowest = next(path for path in (output, *output.parents) if path.exists())
    if not lowest.is_dir():
        raise PosencError(f"output: {lowest} is a file, not a folder. Name another --output.")
    if not os.access(lowest, os.W_OK):
        raise PosencError(f"output: no permission to write to {lowest}. Name another --output.")


def refuse_absent_packages(settings: Settings) -> None:
    """Raise if a package that the recipe needs is not installed."""
    for (section, key), packages in PACKAGES.items():
        value = getattr(getattr(settings, section), key)
        package = packages.get(value)
        if package is not None and importlib.util.find_spec(package) is None:
            raise PosencError(f"{section}.{key}: {value} needs {package}: pip install {package}.")
    if importlib.util.find_spec("matplotlib") is None:
        raise missing_package("matplotlib", "train", "The picture of a run")


def refuse_other_launch(settings: Settings, found: int, world: int) -> None:
    """Raise if fewer processes share the work than intended: launchers may silently run one, or copies."""
    wanted = settings.train.processes
    if world != found:
        raise PosencError(
            f"{world} processes were launched, but each knows of {found}: they would all train the same. "
            f"On CPUs launch with {launch_option('cpu')}."
        )
    if wanted is not None and wanted != found:
        raise PosencError(
            f"train.processes is {wanted}, and {found} are running. accelerate runs only one with --cpu or "
            f"MULTI_CPU: launch with {launch_option('cpu')} and --num_processes."
        )


def refuse_small_batches(settings: Settings, processes: int) -> None:
    """Raise if a contrastive batch has only one row, or is spread over processes."""
    if settings.model.objective != "contrastive":
        return
    if settings.train.per_device_train_batch_size < 2 or processes > 1:
        raise PosencError(
            "model.objective: contrastive compares the rows of one batch: it needs one process and "
            "train.per_device_train_batch_size from 2 up."
        )


def refuse_misfit(settings: Settings, model: Any, tokenizer: Any) -> None:
    """Raise if the rows do not fit the model."""
    longest, where = settings.data.reach, places(model)
    described: Any = describe(model) if is_patched(model) else None
    reach = described.target_length if described else config_length(where) if where.has_table else None
    if reach is not None and longest > reach:
        way = "raise scheme.target_length" if described else "name a scheme that reaches further"
        raise PosencError(
            f"Rows reach to position {longest}, and the model is made for {reach}: {way}, or lower data.length."
        )
    if settings.model.objective == "masked" and tokenizer.mask_token_id is None:
        raise PosencError("model.objective: masked needs a tokenizer with a mask token, and this one has none.")
    if settings.model.objective != "causal" and settings.data.passkey:
        raise PosencError("data.passkey is for causal models.")


def refuse_other_base(settings: Settings, came: Record | None, now: Record | None) -> None:
    """Raise if an adapter would be trained on other positions than its saved base has: it could not be loaded."""
    if came is not None and came != now and not settings.tune.whole and settings.tune.lora is not None:
        raise PosencError(
            f"{settings.model.path} is saved with {came.scheme.name!r} positions, and an adapter needs its base as it "
            "was saved. Leave the scheme out of the recipe to tune it as it is, or name the original model."
        )


def refuse_merging(settings: Settings, merged: bool, came: Record | None) -> None:
    """Raise if there is no adapter to merge, or no base to merge it into."""
    if not merged:
        return
    if settings.tune.lora is None:
        raise PosencError(
            "--merge merges adapters, and this recipe trains none: it saves a whole model. Leave --merge out."
        )
    if came is not None and settings.model.quantize is not None:
        raise PosencError(
            f"--merge: {settings.model.path} is saved patched, and held in 4 bits (model.quantize), which cannot be "
            "undone below a patch. Leave --merge out, or name the original model."
        )


def refuse_targets(settings: Settings, model: Any) -> None:
    """Raise if nothing would be trained, or a named projection does not exist, which PEFT would skip."""
    asked = settings.tune
    if asked.whole:
        return
    if asked.lora is None:
        if not whole_modules(model, asked):
            raise PosencError("Nothing would be trained: turn on tune.lora, norms, embeddings, positions or whole.")
        return
    wanted = lora_targets(places(model), asked.lora.target_modules)
    if isinstance(wanted, str):  # all-linear
        return
    kinds = (nn.Linear, nn.Embedding, Conv1D)
    names = [name for name, module in model.named_modules() if isinstance(module, kinds)]
    ends = sorted({name.rpartition(".")[2] for name in names})
    for target in wanted:
        if not any(name == target or name.endswith("." + target) for name in names):
            raise PosencError(
                f"tune.lora.target_modules: no projection of this model is called {target!r}."
                f"{suggestion(target, ends)}"
            )


def refuse_other_head(settings: Settings, model: Any, rows: Any) -> None:
    """Raise if the loss cannot be computed inside the output layer, where that is needed."""
    if settings.train.full_logits or settings.model.objective == "contrastive":
        return
    head = LossHead(model)
    try:
        refuse_other_loss(model, head, collate([next(iter(rows))]), settings.model.objective == "causal")
    finally:
        head.remove()


def refuse_recomputing(settings: Settings, model: Any, device: str) -> None:
    """Raise if layers cannot be recomputed as the recipe asks."""
    asked = settings.train
    if not asked.gradient_checkpointing:
        return
    if not model.supports_gradient_checkpointing:
        raise PosencError(f"train.gradient_checkpointing: {type(model).__name__} cannot recompute its layers.")
    if asked.offload and device == "cpu":
        raise PosencError("train.offload moves activations to CPU memory, where they are already: leave it out.")
    if asked.mlp_tokens is not None:
        plain_mlps(model)


def refuse_generations(settings: Settings, documents: Sequence[Document], sharded: bool) -> None:
    """Raise if texts cannot be generated while training."""
    if settings.train.generate_steps is None:
        return
    if settings.model.objective != "causal" or sharded:
        raise PosencError("train.generate_steps needs a causal model whose parameters are not sharded.")
    if len(documents[0].ids) < settings.data.reach:
        raise PosencError(
            f"train.generate_steps continues texts at {settings.data.reach} tokens, and the longest that is held out "
            f"has {len(documents[0].ids)}. Give longer texts, or hold out more (data.held_out)."
        )


def refuse_full_disk(settings: Settings, trained: int, parameters: int, merged: bool) -> None:
    """Raise if checkpoints would not fit on the disk."""
    size = torch.empty(0, dtype=getattr(torch, settings.model.dtype)).element_size()
    # Master weights and the two moments of Adam, in fp32. A checkpoint is written before an old one is removed.
    checkpoint = 12 * trained
    final = (parameters if settings.tune.whole else trained) * size + (parameters * size if merged else 0)
    wanted = checkpoint * (settings.train.save_total_limit + 1) + final
    output = Path(settings.output).absolute()
    free = shutil.disk_usage(next(path for path in (output, *output.parents) if path.exists())).free
    if wanted > free:
        raise PosencError(
            f"The run would write about {wanted / GB:.1f} GB ({settings.train.save_total_limit + 1} checkpoints of "
            f"{checkpoint / GB:.1f} GB and what comes of it), and {free / GB:.1f} GB are free in {output}. Name "
            "another --output, or train less (tune)."
        )
