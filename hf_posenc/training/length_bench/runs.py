"""One run: a decoder from nothing, one scheme, one task, one seed; and what it gets right at each length."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from ...errors import PosencError, UntrainedWarning
from ...patching.patch import patch_model
from ...schemes import SCHEMES
from ..stdlib import stdlib_texts
from .tasks import ALPHABET, LETTERS, MORE, NUMBERS, PAD, TASKS, VOCABULARY, Example, draw

RANDOMIZED = "+randomized"
STDLIB = "stdlib"
SCHEME_NAMES = ("none", "t5", "alibi", "rope", "sinusoidal", "kerple", "fire", "fox", "rope" + RANDOMIZED)
IGNORED = -100


@dataclass(frozen=True)
class Settings:
    """Sizes of models, of training and of tests."""

    layers: int = 3
    hidden: int = 64
    heads: int = 4
    steps: int = 1000
    batch: int = 32
    learning_rate: float = 1e-3
    longest: int = 20
    """Lengths up to this are trained."""
    tested: tuple[int, ...] = (5, 10, 15, 20, *range(22, 41, 2), 50, 60)
    examples: int = 100
    """Tested at each length."""
    alphabet: int = ALPHABET
    """Of tasks on letters."""
    bucket: int = 1
    """So many batches are drawn at once and their rows sorted by length: there is less padding."""
    row: int = 256
    """Bytes of a row of text, for the task that is one."""
    rows_tested: tuple[int, ...] = (256, 512, 1024, 2048, 4096)


OF_TASK: dict[str, dict[str, Any]] = {
    "copy": {"steps": 4000, "learning_rate": 2e-3, "alphabet": 100, "bucket": 8},
}
"""What a task needs to be learned within the trained lengths, where that is not what all others have."""


def settings_of(task: str, changed: dict[str, Any]) -> Settings:
    return Settings(**{**OF_TASK.get(task, {}), **changed})


@dataclass(frozen=True)
class Job:
    task: str
    scheme: str
    seed: int
    settings: Settings = Settings()

    def __post_init__(self) -> None:
        if self.task not in (*TASKS, STDLIB):
            raise PosencError(f"There is no task {self.task!r}; there are {', '.join((*TASKS, STDLIB))}.")
        if self.scheme.removesuffix(RANDOMIZED) not in SCHEMES:
            raise PosencError(f"There is no scheme {self.scheme.removesuffix(RANDOMIZED)!r}.")
        if not 1 <= self.settings.alphabet <= len(LETTERS):
            raise PosencError(f"An alphabet has 1 to {len(LETTERS)} tokens, not {self.settings.alphabet}.")

    @property
    def vocabulary(self) -> int:
        """How many tokens the model knows."""
        return len(VOCABULARY) - len(MORE) + max(self.settings.alphabet - ALPHABET, 0)

    def draw(self, length: int, rng: random.Random, held_out: bool) -> Example:
        return draw(self.task, length, rng, held_out, self.settings.alphabet)

    @property
    def key(self) -> str:
        """What tells results apart in a file."""
        return json.dumps([self.task, self.scheme, self.seed, asdict(self.settings)], sort_keys=True)


def random_positions(length: int, most: int, generator: torch.Generator) -> Tensor:
    """Randomized positions (Ruoss et al. 2023): a sorted sample of so many out of `most`."""
    return torch.randperm(most, generator=generator)[:length].sort().values


def make_model(job: Job, trained: int, vocabulary: int) -> LlamaForCausalLM:
    """A small decoder with the scheme in place of its RoPE, all of it random."""
    s, name = job.settings, job.scheme.removesuffix(RANDOMIZED)
    torch.manual_seed(job.seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=s.hidden,
        intermediate_size=2 * s.hidden,
        num_hidden_layers=s.layers,
        num_attention_heads=s.heads,
        num_key_value_heads=s.heads,
        max_position_embeddings=trained,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    options: dict[str, Any] = {"threshold": trained} if name == "fire" else {}
    if any(field.name == "seed" for field in dataclasses.fields(SCHEMES[name])):
        options["seed"] = job.seed
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UntrainedWarning)
        return patch_model(model, name, **options)


def make_batch(examples: list[Example]) -> tuple[Tensor, Tensor]:
    """Ids and labels, padded at the end, which nothing before it sees."""
    width = max(len(example.ids) for example in examples)
    ids = torch.full((len(examples), width), NUMBERS[PAD])
    labels = torch.full_like(ids, IGNORED)
    for row, example in enumerate(examples):
        tokens = torch.tensor(example.ids)
        ids[row, : len(tokens)] = tokens
        labels[row, len(tokens) - example.answer_length : len(tokens)] = tokens[-example.answer_length :]
    return ids, labels


def task_batches(job: Job) -> Iterator[tuple[Tensor, Tensor]]:
    rng, s = random.Random(f"train/{job.task}/{job.seed}"), job.settings
    while True:
        lengths = [rng.randint(1, s.longest) for _ in range(s.batch * s.bucket)]
        starts = list(range(0, len(lengths), s.batch))
        if s.bucket > 1:
            lengths.sort()
            rng.shuffle(starts)
        for start in starts:
            yield make_batch([job.draw(length, rng, False) for length in lengths[start : start + s.batch]])


def text_batches(job: Job) -> Iterator[tuple[Tensor, Tensor]]:
    text = torch.frombuffer(bytearray("\n".join(stdlib_texts().values()).encode()), dtype=torch.uint8)
    generator, row = torch.Generator().manual_seed(job.seed), job.settings.row
    while True:
        starts = torch.randint(len(text) - row, (max(job.settings.batch // 8, 1),), generator=generator)
        ids = torch.stack([text[start : start + row] for start in starts]).long()
        yield ids, ids


def train(job: Job, model: LlamaForCausalLM, batches: Iterator[tuple[Tensor, Tensor]], most: int) -> float:
    """The loss of the last steps. `most`: positions that are drawn from, where they are drawn."""
    s = job.settings
    optimizer = torch.optim.AdamW(model.parameters(), lr=s.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    warm = max(s.steps // 20, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: min((n + 1) / warm, 0.5 * (1 + math.cos(math.pi * n / s.steps)) + 0.01)
    )
    generator, losses = torch.Generator().manual_seed(job.seed), []
    model.train()
    for _ in range(s.steps):
        ids, labels = next(batches)
        given: dict[str, Any] = {}
        if job.scheme.endswith(RANDOMIZED):
            given["position_ids"] = random_positions(ids.shape[1], most, generator)[None].expand_as(ids)
            given["attention_mask"] = torch.ones_like(ids)  # a leap would be taken for the border of a text
        loss = model(ids, labels=labels, use_cache=False, **given).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    return sum(losses[-20:]) / len(losses[-20:])


@torch.no_grad()
def exact_match(model: LlamaForCausalLM, examples: list[Example]) -> float:
    """The share of answers that greedy decoding would give whole.

    It follows the answer for as long as each token is the likeliest one after those before it: one pass over the right
    answer shows that.
    """
    model.eval()
    ids, labels = make_batch(examples)
    likeliest = model(ids, use_cache=False).logits[:, :-1].argmax(-1)
    right = (likeliest == labels[:, 1:]) | (labels[:, 1:] == IGNORED)
    return float(right.all(-1).double().mean())


def held_out_examples(job: Job, length: int) -> list[Example]:
    rng = random.Random(f"test/{job.task}/{length}")  # the same for all schemes and seeds
    return [job.draw(length, rng, True) for _ in range(job.settings.examples)]


@torch.no_grad()
def text_loss(model: LlamaForCausalLM, length: int, rows: int = 8) -> float:
    """The mean loss of windows of held-out text, none of which overlap."""
    model.eval()
    text = torch.frombuffer(bytearray("\n".join(stdlib_texts(held_out=True).values()).encode()), dtype=torch.uint8)
    count = max(rows * 512 // length, 2)
    step = max((len(text) - length) // count, 1)
    losses = [model(ids, labels=ids).loss for i in range(count) if len(ids := text[i * step :][:length].long()[None])]
    return float(torch.stack(losses).mean())


def run(job: Job) -> dict[str, Any]:
    """The line of a result."""
    s, began = job.settings, time.process_time()
    if job.task == STDLIB:
        model, most = make_model(job, s.row, 256), max(s.rows_tested)
        loss = train(job, model, text_batches(job), most)
        found = {length: text_loss(model, length) for length in s.rows_tested}
    else:
        longest = max(len(job.draw(s.longest, random.Random(i), False).ids) for i in range(50))
        model, most = make_model(job, longest, job.vocabulary), 4 * max(s.tested)
        loss = train(job, model, task_batches(job), most)
        found = {length: exact_match(model, held_out_examples(job, length)) for length in s.tested}
    return {
        "task": job.task,
        "scheme": job.scheme,
        "seed": job.seed,
        "settings": asdict(s),
        "parameters": sum(p.numel() for p in model.parameters()),
        "train_loss": loss,
        "by_length": {str(length): value for length, value in found.items()},
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def read_results(path: Path) -> list[dict[str, Any]]:
    """Every whole line; the last may have been cut off. Settings that a line does not have are those of `Settings`."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    results = []
    for number, line in enumerate(lines):
        try:
            result = json.loads(line)
        except json.JSONDecodeError:
            if number + 1 < len(lines):
                raise PosencError(f"Line {number + 1} of {path} is no result: the file is damaged.") from None
            continue
        results.append({**result, "settings": {**asdict(Settings()), **result["settings"]}})
    return results


def key_of(result: dict[str, Any]) -> str:
    return json.dumps([result["task"], result["scheme"], result["seed"], result["settings"]], sort_keys=True)
