"""Long documents that each hide one fact, and the query for it. All are generated from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import PosencError
from .needles import LARGEST_KEY, filler, fit_text
from .texts import Document

FIRST = (  # noqa: SIM905
    "Ada Albert Alice Amir Anna Boris Carla Carmen Cecil Clara Daniel Diego Edith Elena Emil Fatima Felix Frida "
    "George Grace Hannah Hugo Ingrid Isaac Ivan Jane Jorge Julia Karim Lars Laura Leo Lucia Marta Max Mina Nadia Nora "
    "Oscar Paula Peter Rosa Samuel Sofia Thomas Vera Victor Walter Yusuf Zoe"
).split()
LAST = (  # noqa: SIM905
    "Adler Baker Barnes Becker Brooks Carter Castro Chen Clark Costa Dawson Diaz Fischer Fletcher Garcia Grant Green "
    "Hansen Harper Hayes Jensen Keller Khan Kowalski Lambert Larsen Lopez Marsh Meyer Moreau Morgan Nakamura Novak "
    "Olsen Palmer Parker Petrov Quinn Reed Rossi Sato Schmidt Silva Stone Tanaka Turner Vargas Walker Weber Young"
).split()
PLACES = (  # noqa: SIM905
    "Accra Athens Bergen Bogota Boston Cairo Calgary Chicago Cork Dakar Delhi Denver Dublin Geneva Glasgow Hanoi "
    "Havana Helsinki Istanbul Jakarta Kyoto Lagos Lima Lisbon Madrid Manila Memphis Milan Montreal Moscow Munich "
    "Nairobi Naples Oslo Oxford Paris Prague Quito Reykjavik Rome Seattle Seoul Sydney Tokyo Toronto Vienna Warsaw "
    "Zurich"
).split()
TOPICS = {
    "the best thing to eat": "fried mushrooms|lentil soup|grilled sardines|plum cake|pepper stew|goat cheese",
    "the loudest animal": "an old parrot|a grey donkey|a tame goose|a blind rooster|a street dog|a sea lion",
    "the oldest shop": "a hat maker's|a violin workshop|a candle store|a bakery|a map dealer's|a pharmacy",
    "the favourite sport": "fencing|rowing|table tennis|archery|ice hockey|wrestling",
    "the rarest flower": "the blue poppy|the ghost orchid|the black tulip|the snow lily|the fire rose|the moon daisy",
    "the strangest law": "a tax on umbrellas|a ban on whistling|a fee for balconies|a curfew for cats|free bread",
}

PASSKEY = "{0}'s pass key is {1}. Remember it. {1} is the pass key for {0}."
PASSKEY_QUERY = "What is the pass key for {}?"
FACT = "In {0}, {1} is {2}."
FACT_QUERY = "What is {1} in {0}?"


@dataclass(frozen=True, kw_only=True)
class Haystacks:
    """How many queries search how many documents. The defaults are those of LongEmbed."""

    queries: int = 50
    documents: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("queries", "documents"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise PosencError(f"{name} must be a whole number from 1 up, got {value!r}.")
        if self.queries > self.documents:
            raise PosencError(
                f"Each of the {self.queries} queries has a document of its own, and there are {self.documents}: ask "
                "for as many documents as queries, or more."
            )
        if self.documents > MOST:
            raise PosencError(f"At most {MOST} documents can be told apart by their facts, got {self.documents}.")


MOST = len(PLACES) * len(TOPICS)


@dataclass(frozen=True, kw_only=True)
class Straw:
    """A document, and the query that only this document answers."""

    query: str
    text: str
    depth: float
    tokens: int


Fact = tuple[str, str]
"""A hidden statement, and the query for it."""
Hay = Callable[[int], str]
"""Makes a text of so many words."""


def pass_keys(rng: random.Random, count: int) -> list[Fact]:
    """Pass keys of people with different names."""
    pairs = rng.sample([(first, last) for first in FIRST for last in LAST], count)
    keys = rng.sample(range(1, LARGEST_KEY + 1), count)
    people = [f"{first} {last}" for first, last in pairs]
    return [(PASSKEY.format(who, key), PASSKEY_QUERY.format(who)) for who, key in zip(people, keys, strict=True)]


def facts(rng: random.Random, count: int) -> list[Fact]:
    """Statements about places. Distractors are about the same place, or the same topic elsewhere."""
    pairs = rng.sample([(place, topic) for place in PLACES for topic in TOPICS], count)
    return [
        (FACT.format(place, topic, rng.choice(TOPICS[topic].split("|"))), FACT_QUERY.format(place, topic))
        for place, topic in pairs
    ]


def filler_hay(rng: random.Random, documents: Sequence[Document]) -> tuple[Hay, int | None]:
    return filler, None


def real_hay(rng: random.Random, documents: Sequence[Document]) -> tuple[Hay, int | None]:
    """Words of a text from a random place on, and how many there are."""
    words = rng.choice(documents).text.split()
    start = rng.randrange(max(1, len(words) // 2))
    return lambda count: " ".join(words[start : start + count]), len(words) - start


Maker = tuple[Callable[[random.Random, int], list[Fact]], Callable[..., tuple[Hay, int | None]]]
HAYSTACKS: dict[str, Maker] = {"embed_passkey": (pass_keys, filler_hay), "embed_needle": (facts, real_hay)}


def haystacks(
    task: str, length: int, tokenizer: Any, asked: Haystacks, documents: Sequence[Document] = ()
) -> list[Straw]:
    """The documents of a task, none longer than `length` tokens, each with its fact at a depth of its own.

    Queries are for the first `asked.queries` of them; the other documents are distractors.
    """
    hidden, hay = HAYSTACKS[task]
    if hay is real_hay and not any(document.text for document in documents):
        raise PosencError(f"{task} hides facts in real text, and none was given: name one with --text.")
    rng = random.Random(f"{asked.seed}/{task}/{length}")
    found = []
    for fact, query in hidden(rng, asked.documents):
        depth = rng.random()
        made, most = hay(rng, documents)
        text, ids = fit_text(_hide(fact, depth, made), tokenizer, length, most)
        if most is not None and len(ids) < length - 32:
            raise PosencError(
                f"The text is too short for {task} at {length} tokens: {most} words of it make {len(ids)}. Give a "
                "longer one, or ask for less."
            )
        found.append(Straw(query=query, text=text, depth=depth, tokens=len(ids)))
    return found


def _hide(fact: str, depth: float, hay: Hay) -> Callable[[int], str]:
    def text(count: int) -> str:
        words = hay(count).split()
        at = round(depth * len(words))
        return " ".join([*words[:at], fact, *words[at:]])

    return text
