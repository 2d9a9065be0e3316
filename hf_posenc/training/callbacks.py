"""Callbacks of a run: throughput and padding, a time limit, and generated texts."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from ..evaluation.measures.texts import Document, bos_of
from .resume import console

WRITTEN = 48
"""Tokens to generate."""
TEXTS = 2
SHOWN = 80
"""Characters of the prompt that are shown."""


class ThroughputMeter:
    """Tokens per second and the share of padding since the last reading."""

    def __init__(self, processes: int):
        self.processes = processes
        self.clear()

    def clear(self) -> None:
        self.tokens, self.padding, self.since = 0, 0, time.monotonic()

    def count(self, tokens: int, padding: int) -> None:
        self.tokens += tokens
        self.padding += padding

    def read(self) -> dict[str, float]:
        seconds = max(time.monotonic() - self.since, 1e-9)
        rows = {
            "tokens_per_second": round(self.tokens * self.processes / seconds, 1),
            "padding": round(self.padding / max(self.tokens, 1), 4),
        }
        self.clear()
        return rows


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


class Generations(TrainerCallback):
    """Generates continuations of held-out texts at the target length; prints them and writes them to a file."""

    def __init__(self, documents: Sequence[Document], tokenizer: Any, length: int, steps: int, output: Path):
        self.documents, self.tokenizer, self.steps, self.output = documents[:TEXTS], tokenizer, steps, output
        self.room = length - WRITTEN

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step % self.steps or not state.is_world_process_zero:
            return
        model = model.module if hasattr(model, "module") else model
        training = model.training
        model.eval()
        with torch.no_grad(), open(self.output / "generations.jsonl", "a", encoding="utf-8") as file:
            for document in self.documents:
                before, written = self.continuation(model, document)
                file.write(json.dumps({"step": state.global_step, "text": before, "written": written}) + "\n")
                console.print(f"step {state.global_step}: ...{before} [bold]{written}[/]", highlight=False)
        model.train(training)

    def continuation(self, model: Any, document: Document) -> tuple[str, str]:
        """The end of a text, and its continuation by the model."""
        bos = bos_of(self.tokenizer, None)
        opening = [] if bos is None else [bos]
        ids = [*opening, *document.ids[: self.room - len(opening)].tolist()]
        given = torch.tensor([ids], device=model.device)
        pad = self.tokenizer.pad_token_id or self.tokenizer.eos_token_id
        made = model.generate(
            input_ids=given, attention_mask=torch.ones_like(given), max_new_tokens=WRITTEN, do_sample=False,
            pad_token_id=pad,
        )  # fmt: skip
        said = self.tokenizer.decode(made[0, len(ids) :], skip_special_tokens=True)
        return self.tokenizer.decode(ids[-SHOWN:], skip_special_tokens=True)[-SHOWN:], said
