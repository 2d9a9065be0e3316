"""Pretrain the model that the package carries, `tiny`, from nothing but the Python installation.

    python tools/pretrain_tiny.py tools/pretrain_tiny.yaml --out tiny

Needs no network and no GPU. Plain next-token training does not find retrieval in this time; a curriculum does: short
rows first, half of them facts and questions, whose positions leap so that the distances of the full length are there
from the start; then longer ones, with the passkey among text.
"""

import argparse
import json
import math
import platform
import random
import statistics
import sys
import time
from bisect import bisect
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_posenc import PosencError
from hf_posenc.errors import suggestion
from hf_posenc.evaluation import Retrieval
from hf_posenc.evaluation.measures.retrieval import retrieval
from hf_posenc.training.retrieval import ROWS
from hf_posenc.training.stdlib import digest, stdlib_texts

BEGIN, END, PADDING = "<s>", "</s>", "<pad>"


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Stage(Strict):
    """A share of the steps, and the rows that are read in it. What is left of the rows is text."""

    share: float = Field(gt=0)
    length: int = Field(gt=1)
    tokens: int = Field(gt=1)
    repeats: float = Field(default=0.0, ge=0, le=1)
    pairs: float = Field(default=0.0, ge=0, le=1)
    passkey: float = Field(default=0.0, ge=0, le=1)
    leaps: int = Field(default=0, ge=0)
    """At most so many times the positions of a row leap ahead: short rows then show all distances of long ones."""


class Settings(Strict):
    """What the YAML says."""

    seed: int
    steps: int = Field(gt=0)
    warmup: int = Field(gt=0)
    decay: float = Field(gt=0, le=1)
    vocab_size: int = Field(gt=259)  # all bytes and three special tokens
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_hidden_layers: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    max_position_embeddings: int = Field(gt=1)
    rope_theta: float = Field(gt=1)
    muon_lr: float = Field(gt=0)
    adam_lr: float = Field(gt=0)
    stages: tuple[Stage, ...] = Field(min_length=1)
    weights: dict[Literal["repeats", "pairs", "passkey"], tuple[float, float]]


def settings_of(path: str, overrides: Sequence[str] = ()) -> Settings:
    """The YAML with what the command line sets; raises for what is unknown, missing or out of range."""
    try:
        given = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise PosencError(f"The settings {path} cannot be read: {error}.") from None
    for override in overrides:
        name, sign, value = override.partition("=")
        if not sign:
            raise PosencError(f"{override!r} sets nothing: write key=value, as in seed=1.")
        given[name] = yaml.safe_load(value)
    try:
        return Settings(**given)
    except ValidationError as error:
        raise PosencError(f"The settings do not fit: {'; '.join(map(fault_words, error.errors()))}.") from None


def fault_words(problem: Any) -> str:
    """One fault of the settings, with the key that may have been meant."""
    where = ".".join(map(str, problem["loc"]))
    if problem["type"] == "extra_forbidden":
        known = (Stage if problem["loc"][0] == "stages" else Settings).model_fields
        return f"unknown key {where!r}.{suggestion(problem['loc'][-1], list(known)).removesuffix('.')}"
    return f"{where}: {problem['msg']}"


def tokenizer_from(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE that takes digits one by one, so that a number is spelt the same wherever it stands.

    Texts open with a token of their own, as those of LLaMA do, which heads that seek nothing rest on.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[BEGIN, END, PADDING], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    opening = [(BEGIN, bpe.token_to_id(BEGIN))]
    bpe.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=opening)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=BEGIN, eos_token=END, pad_token=PADDING, clean_up_tokenization_spaces=False
    )


def model_of(settings: Settings, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    torch.manual_seed(settings.seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.num_hidden_layers,
        num_attention_heads=settings.num_attention_heads,
        max_position_embeddings=settings.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": settings.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


class Muon(torch.optim.Optimizer):
    """Momentum whose directions are made equally long (Jordan et al.), in fp32.

    torch.optim.Muon computes in bf16, which takes seconds a step on processors that know no bf16; matrices of one
    shape go through together here, which spares small products.
    """

    def __init__(self, params: Iterable[torch.nn.Parameter], lr: float, momentum: float):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = {}
            for parameter in group["params"]:
                shapes.setdefault(parameter.shape, []).append(parameter)
            for (rows, columns), parameters in shapes.items():
                buffers = [self.state[p].setdefault("momentum", torch.zeros_like(p)) for p in parameters]
                for buffer, parameter in zip(buffers, parameters, strict=True):
                    buffer.mul_(group["momentum"]).add_(parameter.grad)
                ahead = [p.grad + group["momentum"] * b for p, b in zip(parameters, buffers, strict=True)]
                rate = group["lr"] * math.sqrt(max(1.0, rows / columns))
                for parameter, update in zip(parameters, orthogonal(torch.stack(ahead)), strict=True):
                    parameter.sub_(update, alpha=rate)


def orthogonal(stacked: Tensor) -> Tensor:
    """Matrices with all singular values near 1, by five Newton-Schulz steps."""
    tall = stacked.shape[-2] > stacked.shape[-1]
    x = stacked.mT if tall else stacked
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.mT if tall else x


def optimizers_of(model: LlamaForCausalLM, settings: Settings) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, Adam for embeddings and norms."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    taken = set(map(id, matrices))
    others = [p for p in model.parameters() if id(p) not in taken]
    return [
        Muon(matrices, lr=settings.muon_lr, momentum=0.95),
        torch.optim.AdamW(others, lr=settings.adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def rate(step: int, settings: Settings) -> float:
    """Which part of the learning rate is used: a short rise, a plain, and a line down to nothing."""
    falling = (settings.steps - step) / max(1.0, settings.decay * settings.steps)
    return min(1.0, (step + 1) / settings.warmup, falling)


def stage_at(step: int, settings: Settings) -> Stage:
    done, total = 0.0, sum(stage.share for stage in settings.stages)
    for stage in settings.stages:
        done += stage.share / total
        if step < done * settings.steps:
            return stage
    return settings.stages[-1]


class Reader:
    """Batches of text and of rows that teach to look back."""

    def __init__(self, settings: Settings, tokenizer: PreTrainedTokenizerFast, texts: list[str]):
        self.settings, self.tokenizer, self.texts = settings, tokenizer, texts
        self.rng = random.Random(settings.seed)
        self.stream, self.unseen = self.joined(texts), self.joined(list(stdlib_texts(held_out=True).values()))

    def joined(self, texts: list[str]) -> list[int]:
        encoded = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return [token for ids in encoded for token in (*ids, self.tokenizer.eos_token_id)]

    def row(self, stage: Stage) -> tuple[list[int], list[float]]:
        drawn = self.rng.random()
        for kind, make in ROWS.items():
            drawn -= getattr(stage, kind)
            if drawn < 0:
                ids, answers = make(self.rng, self.tokenizer, stage.length, self.texts)
                others, answer = self.settings.weights[kind]
                return ids, [answer if known else others for known in answers]
        start = self.rng.randrange(len(self.stream) - stage.length)
        return [self.tokenizer.bos_token_id, *self.stream[start + 1 : start + stage.length]], [1.0] * stage.length

    def positions(self, stage: Stage) -> list[int]:
        """Where the tokens of a row stand: in order, with leaps between, never past the full length."""
        leaps = self.rng.randint(0, stage.leaps)
        room = self.settings.max_position_embeddings - stage.length
        cuts = sorted(self.rng.sample(range(1, stage.length), leaps))
        ahead = [0, *sorted(self.rng.randint(0, room) for _ in cuts)]
        return [index + ahead[bisect(cuts, index)] for index in range(stage.length)]

    def batch(self, stage: Stage) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, what they weigh, and their positions."""
        rows = [self.row(stage) for _ in range(stage.tokens // stage.length)]
        ids, weights = (torch.tensor(part) for part in zip(*rows, strict=True))
        return ids, weights, torch.tensor([self.positions(stage) for _ in rows])


def loss_of(model: LlamaForCausalLM, ids: Tensor, weights: Tensor, positions: Tensor | None = None) -> Tensor:
    # Without a mask transformers takes a leap of positions for the border between two texts, and hides the first.
    everything = torch.ones_like(ids)
    logits = model(input_ids=ids, attention_mask=everything, position_ids=positions, use_cache=False).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    kept = weights[:, 1:].flatten()
    return (losses * kept).sum() / kept.sum()


@torch.no_grad()
def glance(model: LlamaForCausalLM, reader: Reader, stage: Stage) -> str:
    """The loss of the answers in rows of each kind, and how many passkeys are written, strictly, at full length."""
    model.eval()
    tokenizer, full = reader.tokenizer, reader.settings.max_position_embeddings
    texts = torch.tensor(reader.unseen[: 40 * (stage.length - 1)]).view(40, -1)
    texts = torch.nn.functional.pad(texts, (1, 0), value=tokenizer.bos_token_id)
    said = [f"unseen text {loss_of(model, texts, torch.ones(texts.shape)):.3f}"]
    for kind, make in ROWS.items():
        if getattr(stage, kind):
            rows = [make(random.Random(i), tokenizer, stage.length, reader.texts) for i in range(8)]
            ids, answers = (torch.tensor(part) for part in zip(*rows, strict=True))
            said.append(f"{kind} {loss_of(model, ids, answers.float()):.2f}")
    found = retrieval(model, tokenizer, "passkey", full, asked=Retrieval(trials=8, distractors=1))
    said.append(f"{statistics.mean(row.value for row in found if row.protocol == 'generation'):.0%} written")
    model.train()
    return ", ".join(said)


def train(model: LlamaForCausalLM, reader: Reader, settings: Settings, watch: int) -> None:
    optimizers = optimizers_of(model, settings)
    base = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    bar, seen = tqdm(range(settings.steps), unit="step"), 0.0
    for step in bar:
        stage = stage_at(step, settings)
        loss = loss_of(model, *reader.batch(stage))
        loss.backward()
        for optimizer, lr in zip(optimizers, base, strict=True):
            optimizer.param_groups[0]["lr"] = lr * rate(step, settings)
            optimizer.step()
            optimizer.zero_grad()
        seen = loss.item() if step == 0 else 0.98 * seen + 0.02 * loss.item()
        if watch and (step + 1) % watch == 0:
            bar.write(f"step {step + 1}: length {stage.length}, loss {seen:.3f}, {glance(model, reader, stage)}")
        bar.set_postfix(loss=f"{seen:.3f}", length=stage.length, refresh=False)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path, about: dict[str, Any]) -> None:
    """A checkpoint in fp16, and beside it what it was made of."""
    model.half().save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "training.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", help="the YAML")
    parser.add_argument("overrides", nargs="*", help="key=value")
    parser.add_argument("--out", required=True, help="the directory of the checkpoint")
    parser.add_argument("--watch", type=int, default=100, help="count passkeys every so many steps; 0: never")
    asked = parser.parse_intermixed_args()  # key=value may stand anywhere
    try:
        settings, corpus = settings_of(asked.settings, asked.overrides), stdlib_texts()
    except PosencError as error:
        sys.exit(str(error))
    start, texts = time.perf_counter(), list(corpus.values())
    tokenizer = tokenizer_from(texts, settings.vocab_size)
    tokenizer.model_max_length = settings.max_position_embeddings
    model = model_of(settings, tokenizer)
    train(model, Reader(settings, tokenizer, texts), settings, asked.watch)
    about = {
        "seed": settings.seed,
        "steps": settings.steps,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "corpus": digest(corpus),
        "threads": torch.get_num_threads(),
        "minutes": round((time.perf_counter() - start) / 60, 1),
        "cpu_minutes": round(time.process_time() / 60, 1),
    }
    save(model, tokenizer, Path(asked.out), about)
    print(json.dumps(about))


if __name__ == "__main__":
    main()
