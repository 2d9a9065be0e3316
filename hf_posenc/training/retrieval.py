"""Rows that train retrieval: repeated text, facts and questions, and the passkey of the evaluation.

Every row has exactly the length that was asked for, and marks the tokens that can be predicted from earlier ones. They
are few, so a model learns them faster with a higher weight.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from ..evaluation.measures.needles import (
    FILLER,
    KEY_QUESTION,
    LARGEST_KEY,
    NUMBER,
    OPENING,
    PASSKEY,
    PASSKEY_QUESTION,
    WORDS,
    filler,
    fit_text,
    haystack,
)
from ..evaluation.measures.retrieval import continuation

Row = tuple[list[int], list[bool]]
"""Tokens, and which of them are answers."""
RowMaker = Callable[[random.Random, Any, int, Sequence[str]], Row]

END = ".\n"
"""The end of an answer, so that the model learns to end a number."""
REAL = 1 / 3
"""How often the filler is real text, if there is some."""
FIRST = 1 / 6
"""How often a needle comes before all filler: the farthest place is the hardest."""
WORDINGS = ((NUMBER, KEY_QUESTION, 100), ("{} is {}.", "{}?", 24))
"""Wordings of statements and questions: the evaluation's and a short one, with the tokens each takes."""


def passkey_row(rng: random.Random, tokenizer: Any, length: int, texts: Sequence[str] = ()) -> Row:
    """Exactly the passkey prompt of the evaluation, with its answer. A third of the rows use `texts` as filler."""
    key = rng.randint(1, LARGEST_KEY)
    depth = max(0.0, rng.uniform(-FIRST / (1 - FIRST), 1.0))
    words = random_excerpt(rng, texts, length) if texts and rng.random() < REAL else []
    needle = PASSKEY.format(key)
    answer = continuation(tokenizer, PASSKEY_QUESTION, f" {key}{END}")

    def prompt(count: int) -> str:
        if words:
            return hide_needle(needle, PASSKEY_QUESTION, words[:count], depth)
        return haystack([(depth, needle)], PASSKEY_QUESTION, count)

    _, ids = fit_text(prompt, tokenizer, length - len(answer), length)
    marks = [False] * len(ids) + [True] * len(answer)
    return fill_row(ids + answer, marks, tokenizer, length)


def hide_needle(needle: str, question: str, words: Sequence[str], depth: float) -> str:
    """The evaluation's `haystack`, with other words as filler."""
    upto = round(depth * len(words))
    return "\n".join([OPENING, " ".join(words[:upto]), needle, " ".join(words[upto:]), question])


def random_excerpt(rng: random.Random, texts: Sequence[str], words: int) -> list[str]:
    """So many words of a random text, followed by filler if it is too short."""
    text = rng.choice(texts)
    start = rng.randrange(max(1, len(text) - 8 * words))
    found = text[start : start + 16 * words].split()
    return [*found, *filler(words).split()][:words]


def pairs_row(rng: random.Random, tokenizer: Any, length: int, texts: Sequence[str] = ()) -> Row:
    """Numbers of things, then questions about them in another order, repeated to fill the row."""
    ids: list[int] = tokenizer("")["input_ids"]  # BOS, if the tokenizer adds it
    marks = [False] * len(ids)
    while len(ids) < length:
        for text, answer in rng.choice((numbers_and_questions, passkey_and_question))(rng, length):
            for part, mark in ((text, False), (answer, True)):
                tokens = tokenizer(part, add_special_tokens=False)["input_ids"]
                ids += tokens
                marks += [mark] * len(tokens)
    return ids[:length], marks[:length]


def numbers_and_questions(rng: random.Random, length: int) -> list[tuple[str, str]]:
    """Statements, which have no answer, and questions with their answers."""
    statement, question, tokens = rng.choice(WORDINGS)
    words = rng.sample(WORDS, rng.randint(1, min(max(1, length // tokens), len(WORDS) // 4)))
    known = {word: str(rng.randint(1, LARGEST_KEY)) for word in words}
    asked = rng.sample(sorted(known), rng.randint(1, len(known)))
    stated = [(statement.format(word, value) + "\n", "") for word, value in known.items()]
    return stated + [(question.format(word), f" {known[word]}{END}") for word in asked]


def passkey_and_question(rng: random.Random, length: int) -> list[tuple[str, str]]:
    """A passkey, a little filler and the question."""
    key = rng.randint(1, LARGEST_KEY)
    between = rng.randint(0, max(0, length // 8))
    start = rng.randrange(len(FILLER))
    words = [FILLER[(start + i) % len(FILLER)] for i in range(between)]
    return [("\n".join([PASSKEY.format(key), " ".join(words), PASSKEY_QUESTION]), f" {key}{END}")]


def repeats_row(rng: random.Random, tokenizer: Any, length: int, texts: Sequence[str] = ()) -> Row:
    """Random tokens that repeat: the next token can be predicted only by looking back."""
    special = set(tokenizer.all_special_ids)
    known = [token for token in range(len(tokenizer)) if token not in special]
    ids: list[int] = tokenizer("")["input_ids"]  # BOS, if the tokenizer adds it
    marks = [False] * len(ids)
    while len(ids) < length:
        segment = rng.choices(known, k=rng.randint(4, max(4, length // 3)))
        noise = rng.choices(known, k=rng.randint(0, max(0, length // 8)))
        ids += [*segment, *noise, *segment]
        # The first token of a repetition cannot be predicted.
        marks += [False] * (len(segment) + len(noise) + 1) + [True] * (len(segment) - 1)
    return ids[:length], marks[:length]


def fill_row(ids: list[int], marks: list[bool], tokenizer: Any, length: int) -> Row:
    """Fill the end of a row with a few words of filler."""
    missing = length - len(ids)
    rest = tokenizer(filler(missing), add_special_tokens=False)["input_ids"][:missing]
    return ids + rest, marks + [False] * missing


ROWS: dict[str, RowMaker] = {"passkey": passkey_row, "pairs": pairs_row, "repeats": repeats_row}
