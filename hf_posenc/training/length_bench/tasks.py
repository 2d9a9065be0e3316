"""The tasks: a prompt and its only right answer, for any length. Each example follows from its seed alone.

One prompt in five, by a hash of its tokens, is for tests and never trained on, so that what is tested within the
trained lengths is new as well; beyond them everything is.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import NamedTuple

ALPHABET = 26
MORE = [f"t{number}" for number in range(ALPHABET, 100)]
"""Tokens beyond the letters, for larger alphabets: others copy with a hundred."""
LETTERS = [*(chr(ord("a") + i) for i in range(ALPHABET)), *MORE]
DIGITS = list("0123456789")
VERBS = {"jump": "JUMP", "walk": "WALK", "run": "RUN", "look": "LOOK"}
SIDES = {"left": "LEFT", "right": "RIGHT"}
TIMES = {"twice": 2, "thrice": 3}
PAD, SEP, END = "<pad>", "<sep>", "<end>"
SPECIAL = [PAD, SEP, END, "+", "and"]
VOCABULARY = [*SPECIAL, *LETTERS[:ALPHABET], *DIGITS, *VERBS, *VERBS.values(), *SIDES, *SIDES.values(), *TIMES, *MORE]
"""What is beyond the letters comes last: a model of tasks without it has no room for it."""
NUMBERS = {token: number for number, token in enumerate(VOCABULARY)}
HELD_OUT = 5


class Example(NamedTuple):
    prompt: list[str]
    answer: list[str]

    @property
    def ids(self) -> list[int]:
        return [NUMBERS[token] for token in (*self.prompt, SEP, *self.answer, END)]

    @property
    def answer_length(self) -> int:
        """How many tokens of `ids` are asked for: the answer and its end."""
        return len(self.answer) + 1


def repeat_one(length: int, rng: random.Random, alphabet: int = ALPHABET) -> Example:
    """One token many times: how many is all that there is to know."""
    tokens = [rng.choice(LETTERS[:alphabet])] * length
    return Example(tokens, tokens)


def copy(length: int, rng: random.Random, alphabet: int = ALPHABET) -> Example:
    tokens = rng.choices(LETTERS[:alphabet], k=length)
    return Example(tokens, tokens)


def reverse(length: int, rng: random.Random, alphabet: int = ALPHABET) -> Example:
    tokens = rng.choices(LETTERS[:alphabet], k=length)
    return Example(tokens, tokens[::-1])


def addition(length: int, rng: random.Random) -> Example:
    """Two numbers of up to so many digits, written with zeros in front, and their sum with one digit more."""
    one, other = rng.randrange(10**length), rng.randrange(10**length)
    prompt = [*f"{one:0{length}d}", "+", *f"{other:0{length}d}"]
    return Example(prompt, list(f"{one + other:0{length + 1}d}"))


def scan(length: int, rng: random.Random) -> Example:
    """Commands, as of SCAN (Lake and Baroni 2018), that ask for so many actions."""
    commands: list[str] = []
    actions: list[str] = []
    while len(actions) < length:
        verb, side, times = rng.choice(list(VERBS)), rng.choice(["", *SIDES]), rng.choice(["", *TIMES])
        once = [*([SIDES[side]] if side else []), VERBS[verb]]
        done = once * TIMES.get(times, 1)
        if len(actions) + len(done) > length:
            if len(actions) + 1 <= length and rng.random() < 0.5:
                side, times, done = "", "", [VERBS[verb]]
            else:
                continue
        commands += [*(["and"] if commands else []), verb, *([side] if side else []), *([times] if times else [])]
        actions += done
    return Example(commands, actions)


TASKS: dict[str, Callable[..., Example]] = {
    "repeat_one": repeat_one,
    "copy": copy,
    "reverse": reverse,
    "addition": addition,
    "scan": scan,
}
OF_LETTERS = ("repeat_one", "copy", "reverse")
"""Tasks that take the size of an alphabet."""
TITLES = {
    "repeat_one": "copy one repeated token",
    "copy": "copy",
    "reverse": "reverse",
    "addition": "addition",
    "scan": "SCAN-like commands",
    "stdlib": "text of the standard library",
}


def is_held_out(example: Example) -> bool:
    digest = hashlib.sha256(" ".join(example.prompt).encode()).digest()
    return digest[0] % HELD_OUT == 0


def draw(task: str, length: int, rng: random.Random, held_out: bool, alphabet: int = ALPHABET) -> Example:
    """An example of one side of the border; lengths that have too few of them are drawn anew for a while."""
    given = {"alphabet": alphabet} if task in OF_LETTERS else {}
    for _ in range(200):
        example = TASKS[task](length, rng, **given)
        if is_held_out(example) == held_out:
            return example
    return draw(task, length + 1, rng, held_out, alphabet)
