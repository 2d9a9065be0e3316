"""Retrieval from long text, scored by the likelihood of answers and by generation."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ...errors import PosencError
from ...patching.patch_state import unwrap_model
from .losses import Pass, forgets, is_cacheable, refuse_broken
from .needles import Retrieval, Trial, room, trials
from .perplexity import Progress, chunks, rows_together
from .processes import ALONE, Processes
from .rows import Row
from .texts import Document


class Prompted:
    """A model that has read prompts of equal length, ready to score or generate continuations."""

    @torch.no_grad()
    def __init__(self, model: Any, ids: Tensor, step: int | None = None):
        self.model, self.ids, self.length = model, ids, ids.shape[1]
        self.cache = DynamicCache() if is_cacheable(model) and not forgets(unwrap_model(model)) else None
        size = step if step and self.cache is not None else self.length
        for at in range(0, self.length, size):  # in parts if one pass would not fit into memory
            part = ids[:, at : at + size]
            end = part.shape[1]
            self.logits = Pass(model, part, at, self.cache).logits(slice(end - 1, end)).float()

    @torch.no_grad()
    def losses(self, answers: Sequence[Sequence[int]]) -> list[float]:
        """The summed loss of one continuation for each prompt."""
        longest = max(map(len, answers))
        padded = torch.tensor([[*answer, *[0] * (longest - len(answer))] for answer in answers])
        logits = self.logits
        if longest > 1:
            logits = torch.cat([logits, self.logits_after(padded[:, :-1], longest - 1)], 1)
            self.forget()
        found = -logits.log_softmax(-1).gather(-1, padded[..., None].to(logits.device))[..., 0].cpu()
        refuse_broken(found, self.length)
        return [float(row[: len(answer)].double().sum()) for row, answer in zip(found, answers, strict=True)]

    @torch.no_grad()
    def greedy(self, count: int, ends: set[int]) -> list[list[int]]:
        """Greedy continuations of up to `count` tokens, or to the end of the text."""
        written = self.logits.argmax(-1).cpu()
        while written.shape[1] < count and not all(ends & set(row) for row in written.tolist()):
            new = written if self.cache is None else written[:, -1:]
            written = torch.cat([written, self.logits_after(new, 1).argmax(-1).cpu()], 1)
        self.forget()
        rows: list[list[int]] = written.tolist()
        return [row[: next((i for i, token in enumerate(row) if token in ends), count)] for row in rows]

    def logits_after(self, tokens: Tensor, last: int) -> Tensor:
        """Logits after the last of these tokens, which follow the prompts."""
        if self.cache is None:
            tokens = torch.cat([self.ids, tokens], 1)
        stop = tokens.shape[1]
        at = 0 if self.cache is None else int(self.cache.get_seq_length())
        return Pass(self.model, tokens, at, self.cache).logits(slice(stop - last, stop)).float()

    def forget(self) -> None:
        """Crop the cache back to the prompts."""
        if self.cache is not None:
            extra = int(self.cache.get_seq_length()) - self.length
            if extra:
                self.cache.crop(-extra)


def continuation(tokenizer: Any, prompt: str, answer: str) -> list[int]:
    """The tokens that `answer` adds to a prompt."""
    tail = prompt[-100:]
    before, after = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (tail, tail + answer))
    if after[: len(before)] != before or len(after) == len(before):
        raise PosencError(
            f"This tokenizer joins the end of the prompt with the answer {answer!r}, which cannot be scored then."
        )
    return list(after[len(before) :])


def share_written(answers: Sequence[str], written: str) -> float:
    """The share of the answers that the model wrote. Only the first integers that it wrote count."""
    if not answers[0].strip().isdigit():
        said, wanted = " ".join(written.split()).strip("\"' "), answers[0].strip()
        return float(said.startswith(wanted))
    said_numbers = re.findall(r"\d+", written)[: len(answers)]
    return sum(answer.strip() in said_numbers for answer in answers) / len(answers)


def share_ranked_first(answers: Sequence[float], distractors: Sequence[float]) -> float:
    """The share of the k answers among the k likeliest candidates. Ties count for the distractor."""
    return sum(
        sum(d <= answer for d in distractors) + _count_better(answers, answer) < len(answers) for answer in answers
    ) / len(answers)


def _count_better(answers: Sequence[float], one: float) -> int:
    return sum(other < one for other in answers)


def answer_trials(
    model: Any,
    tokenizer: Any,
    made: Sequence[Trial],
    new_tokens: int,
    batch_size: int | None,
    progress: Progress | None,
    shared: Processes = ALONE,
    step: int | None = None,
) -> list[dict[str, Any]]:
    """The result of each trial, scored both ways."""

    def size(index: int) -> int:
        return len(made[index].ids)

    def ask(batch: list[int]) -> list[dict[str, Any]]:
        found = _answer_batch(model, tokenizer, [made[i] for i in batch], new_tokens, step)
        if progress is not None:
            progress(size(batch[0]) * len(batch) * shared.count)
        return found

    together: list[list[int]] = []
    for length, group in groupby(sorted(range(len(made)), key=size), key=size):
        together += chunks(list(group), batch_size or rows_together(length, model.device.type))
    results: dict[int, dict[str, Any]] = {}
    for batch, found in zip(together, shared.each(together, ask), strict=True):
        results.update(zip(batch, found, strict=True))
    return [results[i] for i in range(len(made))]


def _answer_batch(
    model: Any, tokenizer: Any, made: Sequence[Trial], new_tokens: int, step: int | None
) -> list[dict[str, Any]]:
    prompted = Prompted(model, torch.tensor([trial.ids for trial in made]), step)
    written = prompted.greedy(new_tokens, ends_of(model))
    scores = _candidate_losses(prompted, tokenizer, made, [trial.prompt for trial in made])
    if made[0].question:  # subtract the likelihood that candidates have without the text
        for scored, trial in zip(scores, made, strict=True):
            alone = Prompted(model, torch.tensor([tokenizer(trial.question)["input_ids"]]))
            (prior,) = _candidate_losses(alone, tokenizer, [trial], [trial.question])
            scored[:] = [loss - before for loss, before in zip(scored, prior, strict=True)]
    results = []
    for trial, losses, tokens in zip(made, scores, written, strict=True):
        said = tokenizer.decode(tokens, skip_special_tokens=True)
        count = len(trial.answers)
        results.append(
            {
                "seed": trial.seed,
                "depth": trial.depth,
                "tokens": len(trial.ids),
                "prompt": trial.prompt,
                "answers": list(trial.answers),
                "distractors": list(trial.distractors),
                "losses": losses,
                "generated": said,
                "likelihood": share_ranked_first(losses[:count], losses[count:]),
                "generation": share_written(trial.answers, said),
            }
        )
    return results


def _candidate_losses(
    prompted: Prompted, tokenizer: Any, made: Sequence[Trial], prompts: Sequence[str]
) -> list[list[float]]:
    """For each trial, the losses of its answers, then of its distractors."""
    candidates = [[*trial.answers, *trial.distractors] for trial in made]
    scores: list[list[float]] = [[] for _ in made]
    for together in zip(*candidates, strict=True):
        tokens = [continuation(tokenizer, prompt, text) for prompt, text in zip(prompts, together, strict=True)]
        for scored, loss in zip(scores, prompted.losses(tokens), strict=True):
            scored.append(loss)
    return scores


def ends_of(model: Any) -> set[int]:
    """The tokens that end a text."""
    inner = unwrap_model(model)
    generation = getattr(inner, "generation_config", None)
    end = getattr(generation, "eos_token_id", None) or getattr(inner.config, "eos_token_id", None)
    return {end} if isinstance(end, int) else set(end or ())


def retrieval(
    model: Any,
    tokenizer: Any,
    task: str,
    length: int,
    *,
    asked: Retrieval | None = None,
    documents: Sequence[Document] = (),
    batch_size: int | None = None,
    scheme: str = "unpatched",
    progress: Progress | None = None,
    shared: Processes = ALONE,
    step: int | None = None,
) -> list[Row]:
    """Accuracy at each depth, by likelihood and by generation. The details hold prompts and answers."""
    asked = asked or Retrieval()
    made = trials(task, length, tokenizer, asked, documents)
    results = answer_trials(model, tokenizer, made, room(task, asked), batch_size, progress, shared, step)
    rows = []
    for depth in dict.fromkeys(trial.depth for trial in made):
        here = [result for result in results if result["depth"] == depth]
        answers = len(made[0].answers)
        chance = {"likelihood": answers / (answers + asked.distractors), "generation": 0.0}
        for protocol, guessing in chance.items():
            value, error = accuracy([result[protocol] for result in here])
            details: dict[str, Any] = {
                "how": HOW[protocol],
                "depth": depth,
                "chance": guessing,
                "tokens": [result["tokens"] for result in here],
                "seed": asked.seed,
                "seeds": len(here),
                "trials": here if protocol == "likelihood" else [],
            }
            row = Row(
                task=task, protocol=protocol, scheme=scheme, length=length, metric="accuracy", value=value,
                stderr=error, n=len(here), details=details,
            )  # fmt: skip
            rows.append(row)
    return rows


HOW = {
    "likelihood": "the answer must be likelier than every distractor; error after Agresti and Coull",
    "generation": "the first integers (or words) written must be the answer; error after Agresti and Coull",
}


def accuracy(scores: Sequence[float]) -> tuple[float, float]:
    """The mean, and Agresti and Coull's error, which is not 0 even if all trials end alike."""
    n, total = len(scores), math.fsum(scores)
    share = (total + 2) / (n + 4)
    return total / n, math.sqrt(share * (1 - share) / (n + 4))
