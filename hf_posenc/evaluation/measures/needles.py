"""Prompts that hide something in a long text and ask for it, each generated from a seed."""

from __future__ import annotations

import random
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import PosencError
from .texts import Document

# Mohtashami & Jaggi's passkey, as PI, YaRN, LongLoRA and PoSE use it.
OPENING = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.".split()  # noqa: SIM905
PASSKEY = "The pass key is {0}. Remember it. {0} is the pass key."
PASSKEY_QUESTION = "What is the pass key? The pass key is"
LARGEST_KEY = 50_000

NUMBER = "The special magic number for {} is {}."
KEY_QUESTION = "What is the special magic number for {0}? The special magic number for {0} is"
VALUES_QUESTION = "What are all the special magic numbers for {0}? The special magic numbers for {0} are"
WORDS = (  # noqa: SIM905
    "anchor apple basket bridge candle castle cherry copper desert dragon engine feather forest garden hammer harbor "
    "island jacket kettle ladder lemon market mirror mountain needle ocean orange paper pencil pepper pillow planet "
    "ribbon river saddle silver spider summer temple ticket tiger timber tunnel valley velvet window winter yellow"
).split()

# The prompt of Lost in the Middle (Liu et al.), which HELMET's json_kv uses.
PAIRS_OPENING = "Extract the value corresponding to the specified key in the JSON object below."
PAIR_QUESTION = 'Key: "{}"\nCorresponding value:'
PAIR_WORDS = 32
"""Words of filler that take the room of one pair, which has about eighty characters."""

SENTENCE_QUESTION = "\n\nWhat is the first sentence of the text above? The first sentence of the text above is:"
SENTENCE_WORDS = 12
SENTENCE = re.compile(r"(?<=[.!?]) (?=[A-Z])")


@dataclass(frozen=True, kw_only=True)
class Retrieval:
    """How many trials there are, and how hard they are."""

    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    trials: int = 10
    """At each depth."""
    distractors: int = 9
    needles: int = 4
    """Number of keys in multikey. Multivalue has so many values of one key, and as many of others."""
    new_tokens: int = 10
    """Tokens reserved for an answer, as part of the length."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.depths or not all(0 <= depth <= 1 for depth in self.depths):
            raise PosencError(f"Depths are from 0 (the start) to 1 (the end), got {self.depths}.")
        for name in ("trials", "distractors", "needles", "new_tokens"):
            if getattr(self, name) < 1:
                raise PosencError(f"{name} must be a whole number from 1 up, got {getattr(self, name)!r}.")
        if 2 * self.needles > len(WORDS):
            raise PosencError(f"At most {len(WORDS) // 2} needles can be told apart, got {self.needles}.")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A prompt, its right continuations, and wrong ones."""

    task: str
    depth: float
    seed: str
    prompt: str
    ids: tuple[int, ...]
    answers: tuple[str, ...]
    distractors: tuple[str, ...]
    question: str = ""
    """The question without the text. Its likelihoods are subtracted, where answers differ in prior likelihood."""


def fit_text(
    make: Callable[[int], str], tokenizer: Any, budget: int, most: int | None = None
) -> tuple[str, list[int]]:
    """The longest text `make(words)` with at most `budget` tokens, and its tokens."""

    def ids(words: int) -> list[int]:
        found: list[int] = tokenizer(make(words), verbose=False)["input_ids"]
        return found

    low, high, kept = 0, budget if most is None else most + 1, ids(0)
    empty = len(kept)
    if empty > budget:
        raise PosencError(
            f"The question alone takes {empty} tokens, and there is room for {budget}: use greater lengths."
        )
    rate = 1.3  # a first guess of tokens for each word
    while high - low > 1:
        words = min(max(low + int((budget - len(kept)) / rate), low + 1), high - 1)
        tried = ids(words)
        rate = max((len(tried) - empty) / words, 0.5)
        if len(tried) <= budget:
            low, kept = words, tried
        else:
            high = words
    return make(low), kept


def haystack(needles: Sequence[tuple[float, str]], question: str, words: int) -> str:
    """Lines of filler with a needle after each, at its depth (0 to 1), and the question."""
    lines, at = [OPENING], 0
    for depth, needle in sorted(needles):
        upto = round(depth * words)
        lines += [filler(upto - at), needle]
        at = upto
    return "\n".join([*lines, filler(words - at), question])


def filler(words: int) -> str:
    return " ".join((FILLER * (words // len(FILLER) + 1))[:words])


Maker = Callable[[random.Random, float, Retrieval, Sequence[Document]], dict[str, Any]]


def passkey(rng: random.Random, depth: float, asked: Retrieval, documents: Sequence[Document]) -> dict[str, Any]:
    key = rng.randint(1, LARGEST_KEY)
    alike = range(10 ** (len(str(key)) - 1), min(10 ** len(str(key)), LARGEST_KEY + 1))
    others = numbers(rng, asked.distractors, {key}, alike if len(alike) > asked.distractors else range(1, LARGEST_KEY))
    return {
        "make": lambda words: haystack([(depth, PASSKEY.format(key))], PASSKEY_QUESTION, words),
        "answers": (f" {key}",),
        "distractors": tuple(f" {other}" for other in others),
    }


def multikey(rng: random.Random, depth: float, asked: Retrieval, documents: Sequence[Document]) -> dict[str, Any]:
    """Hide several keys with a number each, and ask for one: the other numbers are hard distractors."""
    words = rng.sample(WORDS, asked.needles)
    values = numbers(rng, max(asked.needles, asked.distractors + 1), set(), range(10_000, 100_000))
    depths = [depth, *(rng.random() for _ in words[1:])]
    needles = [(d, NUMBER.format(word, value)) for d, word, value in zip(depths, words, values, strict=False)]
    return {
        "make": lambda count: haystack(needles, KEY_QUESTION.format(words[0]), count),
        "answers": (f" {values[0]}",),
        "distractors": tuple(f" {value}" for value in values[1 : asked.distractors + 1]),
    }


def multivalue(rng: random.Random, depth: float, asked: Retrieval, documents: Sequence[Document]) -> dict[str, Any]:
    """Hide several numbers of one key, the first at the depth, among those of other keys; ask for all of them."""
    key, *others = rng.sample(WORDS, asked.needles + 1)
    values = numbers(rng, asked.needles + max(asked.needles, asked.distractors), set(), range(10_000, 100_000))
    words = [key] * asked.needles + others
    depths = [depth, *(rng.random() for _ in words[1:])]
    needles = [(d, NUMBER.format(word, value)) for d, word, value in zip(depths, words, values, strict=False)]
    return {
        "make": lambda count: haystack(needles, VALUES_QUESTION.format(key), count),
        "answers": tuple(f" {value}" for value in values[: asked.needles]),
        "distractors": tuple(f" {value}" for value in values[asked.needles :][: asked.distractors]),
    }


def first_sentence(
    rng: random.Random, depth: float, asked: Retrieval, documents: Sequence[Document]
) -> dict[str, Any]:
    """Ask for the first sentence of a real text, against other sentences of it, cut to the same number of words."""
    if not documents:
        raise PosencError("first_sentence asks about real text, and none was given: name one with --text.")
    sentences = SENTENCE.split(" ".join(rng.choice(documents).text.split()))
    long = [i for i, sentence in enumerate(sentences) if len(sentence.split()) >= SENTENCE_WORDS]
    if len(long) <= asked.distractors:
        raise PosencError(
            f"The text has {len(long)} sentences of {SENTENCE_WORDS} words or more, and {asked.distractors + 1} are "
            "needed for one trial. Give a longer text."
        )
    start = rng.choice(long[: max(1, len(long) // 2)])
    following = " ".join(sentences[start:]).split()
    heads = [" " + " ".join(sentences[i].split()[:SENTENCE_WORDS]) for i in long if i > start]

    def other_heads(words: int) -> tuple[str, ...]:
        inside = " ".join(following[:words])
        seen = [head for head in dict.fromkeys(heads) if head in inside]
        if len(seen) < asked.distractors:
            raise PosencError(
                f"A text of {words} words has {len(seen)} other sentences to confuse the first with, and "
                f"{asked.distractors} are asked for: take longer lengths or fewer distractors."
            )
        return tuple(rng.sample(seen, asked.distractors))

    return {
        "make": lambda words: " ".join(following[:words]) + SENTENCE_QUESTION,
        "answers": (" " + " ".join(sentences[start].split()[:SENTENCE_WORDS]),),
        "distractors": other_heads,
        "question": SENTENCE_QUESTION.strip(),
        "most": len(following),
    }


def json_kv(rng: random.Random, depth: float, asked: Retrieval, documents: Sequence[Document]) -> dict[str, Any]:
    """Ask for the value of one key in a JSON object of random UUIDs."""
    own, seed = (identifier(rng), identifier(rng)), rng.random()
    others = [pair(seed, i) for i in range(asked.distractors)]
    question = PAIR_QUESTION.format(own[0])

    def make(words: int) -> str:
        count = max(asked.distractors, words // PAIR_WORDS)
        pairs = [*others, *(pair(seed, i) for i in range(asked.distractors, count))]
        pairs.insert(round(depth * count), own)
        listed = ",\n ".join(f'"{key}": "{value}"' for key, value in pairs)
        return f"{PAIRS_OPENING}\n\n{{{listed}}}\n\n{question}"

    return {
        "make": make,
        "answers": (f" {own[1]}",),
        "distractors": tuple(f" {value}" for _, value in others),
        "question": question,
    }


def pair(seed: float, number: int) -> tuple[str, str]:
    """A key and its value, which follow from seed and number."""
    rng = random.Random(f"{seed}/{number}")
    return identifier(rng), identifier(rng)


def identifier(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def numbers(rng: random.Random, count: int, taken: set[int], among: range) -> list[int]:
    """Random distinct numbers that are not taken."""
    return [number for number in rng.sample(among, count + len(taken)) if number not in taken][:count]


MAKERS: dict[str, Maker] = {
    "passkey": passkey,
    "multikey": multikey,
    "multivalue": multivalue,
    "json_kv": json_kv,
    "first_sentence": first_sentence,
}
ROOM = {"multivalue": 4, "json_kv": 5, "first_sentence": 3}
"""How many times more tokens an answer takes than a number."""


def trials(
    task: str, length: int, tokenizer: Any, asked: Retrieval, documents: Sequence[Document] = ()
) -> list[Trial]:
    """The trials of a task. Prompt and answer together are at most `length` tokens."""
    budget = length - room(task, asked)
    found = []
    at_start = task == "first_sentence"
    for depth in (0.0,) if at_start else asked.depths:
        for number in range(asked.trials * (len(asked.depths) if at_start else 1)):
            seed = f"{asked.seed}/{task}/{length}/{depth:g}/{number}"
            made = MAKERS[task](random.Random(seed), depth, asked, documents)
            make, wrong, most = made.pop("make"), made.pop("distractors"), made.pop("most", None)
            prompt, ids = fit_text(make, tokenizer, budget, most)
            if most is not None and len(tokenizer(make(most), verbose=False)["input_ids"]) <= budget:
                raise PosencError(f"The text is too short for first_sentence at {length} tokens: it has {len(ids)}.")
            if callable(wrong):
                wrong = wrong(len(prompt.split()) - len(SENTENCE_QUESTION.split()))
            found.append(
                Trial(task=task, depth=depth, seed=seed, prompt=prompt, ids=tuple(ids), distractors=wrong, **made)
            )
    return found


def room(task: str, asked: Retrieval) -> int:
    """Tokens reserved for the answer."""
    return asked.new_tokens * ROOM.get(task, 1)
