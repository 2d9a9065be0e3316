"""What a decoder that nobody here trained makes of texts longer than it was trained on, without any training.

    python tools/study_lengths.py MODEL --text 'books/*.txt' --out docs/results/study-NAME-keys.jsonl

Two arms for each scheme. `loss`: one pass over a window of the target length, and the loss of the tokens just before
each length of the table. `passkeys`: one pass over a haystack with a key at each of several depths, and a question for
each key over the same cache. A line is written for each scheme and window, so an interrupted run goes on, and schemes
come round window by window: stopped at any moment, they have read the same text. `make docs` makes the tables of
docs/study.md from these lines.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from hf_posenc import load, unpatch_model
from hf_posenc.evaluation import Document, read_documents
from hf_posenc.evaluation.measures.losses import token_losses
from hf_posenc.evaluation.measures.retrieval import Prompted, continuation
from hf_posenc.evaluation.runs.entries import parsed_schemes, patch_with

SCHEMES = "linear,ntk:alpha=cover,yarn,dynamic_ntk,self_extend,dca"
UNPATCHED = "unpatched"
BAND = 256
"""Tokens just before a length whose loss stands for it."""
DEPTHS = (0.05, 0.25, 0.45, 0.65, 0.85)
NAMES = ("Anna", "Boris", "Clara", "David", "Elena", "Felix", "Greta", "Henry")


def bands(model: Any, ids: torch.Tensor, lengths: list[int]) -> dict[str, float]:
    """The mean loss of the last tokens before each length, in one pass."""
    losses = token_losses(model, ids[None])[0].double()  # the loss of token i is at i - 1
    return {str(n): float(losses[max(0, n - BAND - 1) : n - 1].mean()) for n in lengths}


def haystack(document: Document, tokenizer: Any, length: int, seed: int) -> tuple[list[int], dict[str, str]]:
    """Prose with a sentence for each key, of `length` tokens with room for a question, and the keys by name."""
    draw = random.Random(f"{seed} {length}")
    names = draw.sample(NAMES, len(DEPTHS))
    keys = {name: str(draw.randrange(10000, 100000)) for name in names}
    told = [tokenizer(f"\nThe pass key of {name} is {key}. Remember it.\n")["input_ids"] for name, key in keys.items()]
    room = length - sum(map(len, told)) - 24  # for the question and the answer
    start = draw.randrange(len(document.ids) - room)
    prose = document.ids[start : start + room].tolist()
    ids, at = [], 0
    for depth, sentence in zip(DEPTHS, told, strict=True):
        ids += prose[at : (at := int(depth * room))] + sentence
    return ids + prose[at:], keys


@torch.no_grad()
def passkeys(model: Any, tokenizer: Any, document: Document, length: int, seed: int) -> dict[str, Any]:
    """Which of the keys are likeliest among all of them, and which the model writes."""
    ids, keys = haystack(document, tokenizer, length, seed)
    found: dict[str, Any] = {"likelihood": [], "generation": []}
    read = Prompted(model, torch.tensor([ids]))
    for name, key in keys.items():
        prompt = f"\nWhat is the pass key of {name}? The pass key of {name} is"
        asked = tokenizer(prompt)["input_ids"]
        losses = {}
        for candidate in keys.values():
            answer = continuation(tokenizer, prompt, f" {candidate}")
            whole = asked + answer
            logits = read.logits_after(torch.tensor([whole[:-1]]), len(answer)).log_softmax(-1)[0].cpu()
            read.forget()
            losses[candidate] = -float(logits.gather(-1, torch.tensor(answer)[:, None]).double().sum())
            if candidate == key:  # written greedily as far as every token of the answer was the likeliest
                found["generation"].append(bool((logits.argmax(-1) == torch.tensor(answer)).all()))
        found["likelihood"].append(min(losses, key=losses.__getitem__) == key)
    return found


def work(args: argparse.Namespace) -> Iterator[tuple[str, str, int, int]]:
    """Scheme, arm, length and number, schemes coming round for each number."""
    schemes = [UNPATCHED, *(entry.label for entry in parsed_schemes(args.schemes))]
    for number in range(args.windows):
        yield from ((scheme, "loss", max(args.lengths), number) for scheme in schemes)
    for number in range(args.haystacks):
        for length in args.key_lengths:
            yield from ((scheme, "passkeys", length, number) for scheme in schemes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--text", nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--schemes", default=SCHEMES)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 12288, 16384])
    parser.add_argument("--key-lengths", type=int, nargs="*", default=[8192, 12288])
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--haystacks", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    model = load(args.model, dtype=getattr(torch, args.dtype)).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    documents = read_documents(args.text, tokenizer)
    entries = {entry.label: entry for entry in parsed_schemes(args.schemes)}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    before = args.out.read_text(encoding="utf-8").splitlines() if args.out.exists() else []
    done = {(row["scheme"], row["arm"], row["length"], row["number"]) for row in map(json.loads, before)}
    for key in work(args):
        if key in done:
            continue
        scheme, arm, length, number = key
        if scheme in entries:
            patch_with(model, entries[scheme], max(args.lengths))
        document, started = documents[number % len(documents)], time.process_time()
        if arm == "loss":
            start = (len(document.ids) - length) * (1 + number // len(documents)) // 3
            value: Any = bands(model, document.ids[start : start + length], args.lengths)
        else:
            value = passkeys(model, tokenizer, document, length, number)
        row = dict(zip(("scheme", "arm", "length", "number"), key, strict=True))
        row |= {"value": value, "document": document.name, "dtype": args.dtype, "model": Path(args.model).name}
        row |= {"cpu_seconds": round(time.process_time() - started, 1), "threads": torch.get_num_threads()}
        if scheme in entries:
            unpatch_model(model)
        with args.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
