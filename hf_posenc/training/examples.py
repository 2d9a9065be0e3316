"""Examples of prompts and answers: only answers are trained on, and examples are never cut."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from ..errors import PosencError
from .rows import Cutter, Row, repeat_endlessly

GENERATION = "{% generation"
"""How a chat template marks the assistant's turns, if it does."""


class Tokens(NamedTuple):
    """An example: its tokens, and which of them are trained on."""

    ids: list[int]
    predicted: list[bool]


def of_prompt(tokenizer: Any, example: tuple[str, str]) -> Tokens:
    """BOS, prompt, completion, EOS. Both are tokenized separately, as when the model is used."""
    bos, eos = ([] if token is None else [token] for token in (tokenizer.bos_token_id, tokenizer.eos_token_id))
    prompt, completion = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in example)
    before, after = [*bos, *prompt], [*completion, *eos]
    return Tokens(before + after, [False] * len(before) + [True] * len(after))


def of_chat(tokenizer: Any, messages: Sequence[dict[str, Any]]) -> Tokens:
    """A chat by the tokenizer's template. The assistant's turns, with their ends, are trained on."""
    template = tokenizer.chat_template
    if not template:
        raise PosencError(
            "data.format: chat needs a tokenizer with a chat template, and this one has none. Name another "
            "(model.tokenizer), or write prompts and completions (data.format: prompt_completion)."
        )
    if GENERATION in str(template).replace("{%-", "{%"):
        found = tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return Tokens(list(found["input_ids"]), [bool(mask) for mask in found["assistant_masks"]])
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    spans = list(assistant_spans(tokenizer, messages, text))
    if not tokenizer.is_fast:
        raise PosencError("data.format: chat needs a fast tokenizer, which tells where each token stands in the text.")
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    inside = [any(start <= a and b <= end and a < b for start, end in spans) for a, b in found["offset_mapping"]]
    return Tokens(list(found["input_ids"]), inside)


def assistant_spans(tokenizer: Any, messages: Sequence[dict[str, Any]], text: str) -> Iterator[tuple[int, int]]:
    """The character spans of the assistant's turns, after the generation prompt."""
    for at, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        asked = tokenizer.apply_chat_template(messages[:at], tokenize=False, add_generation_prompt=True)
        told = tokenizer.apply_chat_template(messages[: at + 1], tokenize=False)
        if not told.startswith(asked) or not text.startswith(told):
            raise PosencError(
                "The tokenizer's chat template changes earlier turns when later ones follow, so the assistant's "
                "tokens cannot be found. Use a template that marks them ({% generation %})."
            )
        yield len(asked), len(told)


READ: dict[str, Callable[[Any, Any], Tokens]] = {"prompt_completion": of_prompt, "chat": of_chat}


def usable_examples(examples: Iterable[Tokens], length: int) -> Iterator[Tokens]:
    """Examples that have tokens to train on, and fit into a row."""
    return (example for example in examples if any(example.predicted) and len(example.ids) <= length)


def refuse_long(examples: Sequence[Tokens], length: int, name: str) -> None:
    long = [len(example.ids) for example in examples if len(example.ids) > length]
    if long:
        raise PosencError(
            f"{len(long)} of the {len(examples)} examples of {name} are longer than a row of {length} tokens, the "
            f"longest has {max(long)}: raise data.length, or leave them out (data.too_long: drop)."
        )


class Examples:
    """Whole examples packed into rows, with padding at the end."""

    def __init__(self, examples: Sequence[Tokens], pad: int):
        self.examples, self.pad = examples, pad
        self.packed: dict[int, list[list[int]]] = {}
        self.passes: dict[int, int] = {}

    def __len__(self) -> int:
        return sum(len(example.ids) for example in self.examples)

    def cut(self, index: int, room: int, seed: int) -> Row:
        rows = self.packed.setdefault(room, [])
        while len(rows) <= index:
            passes = self.passes.get(room, 0)
            order = list(range(len(self.examples)))
            random.Random(f"{seed}/{passes}").shuffle(order)
            rows += self._packing(order, room)
            self.passes[room] = passes + 1
        return pack_examples([self.examples[i] for i in rows[index]], room, self.pad)

    def _packing(self, order: Sequence[int], room: int) -> list[list[int]]:
        rows: list[list[int]] = []
        left = 0
        for number in order:
            size = len(self.examples[number].ids)
            if size > left:
                rows.append([])
                left = room
            rows[-1].append(number)
            left -= size
        return rows

    def refuse_short(self, length: int, room: int) -> None:
        if not self.examples:
            raise PosencError(
                f"No example of at most {length} tokens holds anything to learn: completions are empty, or rows too "
                "short (data.length)."
            )


def pack_examples(examples: Sequence[Tokens], room: int, pad: int) -> Row:
    """A row of examples, each a separate piece, with padding after them."""
    ids = [token for example in examples for token in example.ids]
    predicted = [mark for example in examples for mark in example.predicted]
    pieces = [len(example.ids) for example in examples]
    padding = room - len(ids)
    if padding:
        pieces.append(padding)
    return Row([*ids, *[pad] * padding], pieces, predicted=[*predicted, *[False] * padding], padding=padding)


def whole_examples(examples: Callable[[], Iterator[Tokens]], pad: int) -> Cutter:
    """Rows of whole examples from a stream."""
    source = repeat_endlessly(examples)
    waiting: list[Tokens] = []

    def cut(index: int, room: int) -> Row:
        chosen: list[Tokens] = []
        left = room
        while True:
            example = waiting.pop() if waiting else next(source)
            if len(example.ids) > left:
                waiting.append(example)
                return pack_examples(chosen, room, pad)
            chosen.append(example)
            left -= len(example.ids)

    return cut
