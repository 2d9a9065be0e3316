"""`--dry-run`: what a run would read, take and write, without training; whatever would be refused is."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from .loss import LOGITS
from .recipe import Run, prepared
from .rows import IGNORED
from .settings import Settings
from .trainer import rows_a_step
from .tuning import trained_count

SOME = 32
"""Rows that shares are counted in."""
SHOWN = 300
"""Characters of the first row's ends."""
GB = 1e9
HELD = 12
"""Vectors of a token that a layer keeps for its gradient, about; and those of its MLP."""
HELD_MLP = 4


def dry_run(settings: Settings, merged: bool = False) -> None:
    """Show what a run would be."""
    run = prepared(settings, merged=merged)
    a_step, steps = rows_a_step(run.args), settings.train.max_steps
    rows = list(islice(iter(run.rows), SOME))
    every = sum(row["input_ids"].numel() for row in rows)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    learned = sum(int((row["labels"] != IGNORED).sum()) for row in rows if "labels" in row)
    padding = sum(int(row["padding"]) for row in rows if "padding" in row)
    for name, value in {
        "text": run.data,
        "rows": f"{a_step * steps:,}, {a_step} a step on {run.args.world_size} process(es)",
        "tokens": f"{run.rows.plan.tokens(a_step * steps):,}",
        "steps": f"{steps:,}",
        "learned": f"{learned / every:.0%} of the tokens of {len(rows)} rows; {padding / every:.1%} are padding",
        "parameters": f"{trained_count(run.model, settings.tune):,} trained, {run.parameters:,} in the model",
        "memory": memory(run),
        "written": f"to {settings.output}",
    }.items():
        table.add_row(name, value)
    console = Console()
    console.print(table)
    text = run.tokenizer.decode(rows[0]["input_ids"])
    console.print("\nthe first row:", style="bold")
    console.print(text if len(text) <= 2 * SHOWN else f"{text[:SHOWN]}\n[...]\n{text[-SHOWN:]}", markup=False)


def memory(run: Run) -> str:
    """About what a step takes on each device, where parameters are whole."""
    parts = memory_parts(run)
    told = ", ".join(f"{name} {value / GB:.2f}" for name, value in parts.items())
    return f"about {sum(parts.values()) / GB:.1f} GB a process ({told})"


def memory_parts(run: Run) -> dict[str, float]:
    """Bytes, by what they are for."""
    asked, config = run.settings, run.model.config.get_text_config()
    size = torch.empty(0, dtype=getattr(torch, asked.model.dtype)).element_size()
    computed = 2 if asked.train.bf16 else size
    trained = trained_count(run.model, asked.tune)
    return {
        "weights": sum(p.nbytes for p in run.model.parameters()),
        "what is trained, its gradients and moments": trained * 16,
        "activations": activations(config, asked, computed),
        "loss": loss_memory(config, asked, computed),
    }


def activations(config: Any, asked: Settings, size: int) -> float:
    tokens = asked.train.per_device_train_batch_size * max(asked.data.lengths)
    hidden, layers = config.hidden_size, config.num_hidden_layers
    wide = getattr(config, "intermediate_size", None) or 4 * hidden
    one: float = tokens * (HELD * hidden + HELD_MLP * wide) * size
    if not asked.train.gradient_checkpointing:
        return layers * one
    if asked.train.mlp_tokens is not None:
        one -= max(0, tokens - asked.train.mlp_tokens) * HELD_MLP * wide * size
    kept = 1 if asked.train.recompute_attention else 2
    return layers * tokens * kept * hidden * size + one


def loss_memory(config: Any, asked: Settings, size: int) -> float:
    if asked.model.objective == "contrastive":
        return 0
    tokens = asked.train.per_device_train_batch_size * max(asked.data.lengths)
    if asked.train.full_logits:
        return tokens * config.vocab_size * (size + 8)
    return LOGITS * (4 + size)
