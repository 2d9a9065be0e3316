"""The parts of a run: the model and its tokenizer, the rows cut from text, and the measurement."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    set_seed,
)

from ..checkpoints.load import load
from ..errors import PosencError
from ..evaluation.measures.needles import Retrieval, trials
from ..evaluation.measures.texts import bos_of
from ..models import model_path
from ..patching.describe import describe
from ..patching.patch import patch_model
from ..patching.patch_state import is_patched, record_of
from ..patching.records import Record
from .contrastive import Pairs
from .examples import READ, Examples, refuse_long, usable_examples, whole_examples
from .measurements import frame, held_out_documents, lengths_upto, measure_model
from .mixture import Choice, Mixture, mix_in_order, split_by_length
from .retrieval import passkey_row
from .rows import (
    Cuts,
    Cutter,
    Inputs,
    Masking,
    Plan,
    Row,
    Stream,
    StreamedRows,
    TrainingRows,
    causal_inputs,
    in_order,
    stages,
)
from .settings import Settings, Source
from .sources import Corpus, load_corpus

Texts = Sequence[tuple[Corpus, float]]
"""Texts with their weights."""

AUTO: dict[str, Any] = {"causal": AutoModelForCausalLM, "masked": AutoModelForMaskedLM, "contrastive": AutoModel}
PASSKEY_DOCUMENTS = 200
"""How many documents passkeys are hidden in."""


def make_model(settings: Settings) -> tuple[Any, Any]:
    """The model without a patch of the recipe, and its tokenizer."""
    asked = settings.model
    set_seed(settings.train.seed)  # a fresh model has random weights
    dtype, auto = getattr(torch, asked.dtype), AUTO[asked.objective]
    if asked.path is not None:
        given: dict[str, Any] = {"model_class": auto, "dtype": dtype}
        if asked.quantize is not None:
            given["quantization_config"] = four_bits(asked.quantize, dtype)
        if asked.attn_implementation:
            given["attn_implementation"] = asked.attn_implementation
        if asked.trust_remote_code:
            given["trust_remote_code"] = True
        model = load(asked.path, **given)
        return model, AutoTokenizer.from_pretrained(model_path(asked.tokenizer or asked.path))
    assert asked.tokenizer is not None and asked.config is not None  # the settings guarantee it
    tokenizer = AutoTokenizer.from_pretrained(model_path(asked.tokenizer))
    if asked.objective == "masked" and tokenizer.mask_token_id is None:
        tokenizer.add_special_tokens({"mask_token": "<mask>"})
    sizes = {"vocab_size": len(tokenizer), **asked.config}
    model = auto.from_config(AutoConfig.for_model(sizes.pop("model_type"), **sizes), dtype=torch.float32)
    for (
        parameter
    ) in model.parameters():  # the same random weights in any precision; frequencies are buffers, and stay in fp32
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    return model, tokenizer


def four_bits(kind: str, dtype: torch.dtype) -> BitsAndBytesConfig:
    """Weights in 4 bits as in QLoRA, with matrix products in the model's dtype."""
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_compute_dtype=dtype, bnb_4bit_use_double_quant=True
    )


def patch(settings: Settings, model: Any) -> None:
    """Patch the model with the scheme of the recipe, if it names one."""
    if settings.scheme.name is not None:
        set_seed(settings.train.seed)  # parameters of a scheme may start at random
        patch_model(model, settings.scheme.name, **settings.scheme.options)


def positions_record(model: Any) -> Record | None:
    """How the model was patched, if it was."""
    return record_of(model) if is_patched(model) else None


def positions_name(model: Any) -> str:
    """The label of the model's results."""
    return str(describe(model).scheme) if is_patched(model) else "unpatched"


def training_rows(settings: Settings, texts: Texts, tokenizer: Any, a_step: int) -> TrainingRows | StreamedRows:
    """The rows to train on: `a_step` rows for every step."""
    asked = settings.data
    plan = make_plan(settings, tokenizer, stages(asked, settings.train.max_steps, a_step), texts)
    weights = [weight for _, weight in texts]
    if any(text.streamed for text, _ in texts):
        refuse_unseen(texts)
        choice = Choice(weights, len(plan), settings.train.seed)
        makers = [partial(make_cutter, text, tokenizer, settings) for text, _ in texts]
        return StreamedRows(lambda: mix_in_order([make() for make in makers], choice), plan)
    found = [part for text, weight in texts for part in make_cuts(text, weight, tokenizer, settings)]
    if len(found) == 1:
        return TrainingRows(found[0][0], plan)
    choice = Choice([weight for _, weight in found], len(plan), settings.train.seed)
    return TrainingRows(Mixture([part for part, _ in found], choice), plan)


def refuse_unseen(texts: Texts) -> None:
    """Raise if a run could find a too long example only after days."""
    unseen = next((text.name for text, _ in texts if text.format != "text" and text.streamed and not text.drops), None)
    if unseen is not None:
        raise PosencError(
            f"{unseen} is read while training, so examples longer than a row cannot be refused before it: leave "
            "them out (data.too_long: drop), or read the text first (data.streaming: false)."
        )


def held_out_rows(settings: Settings, texts: Texts, tokenizer: Any) -> TrainingRows:
    """Rows of held-out text to measure the loss on while training, the same each time."""
    plain = settings.model_copy(update={"data": settings.data.model_copy(update={"passkey": 0.0, "pose": None})})
    plan = make_plan(plain, tokenizer, [(settings.train.eval_rows, settings.data.length)], texts)
    held = [(replace(text, documents=partial(iter, text.held_out), streamed=False), weight) for text, weight in texts]
    kept = settings.model_copy(update={"data": plain.data.model_copy(update={"long_documents": None})})
    parts = [part for text, weight in held for part in make_cuts(text, weight, tokenizer, kept)]
    choice = Choice([weight for _, weight in parts], len(plan), settings.train.seed)
    with name_key("train.eval_steps: no row can be made of the held-out text"):
        return TrainingRows(Mixture([part for part, _ in parts], choice), plan)


def make_plan(settings: Settings, tokenizer: Any, lengths: Sequence[tuple[int, int]], texts: Texts) -> Plan:
    """How rows are made from text."""
    asked, objective = settings.data, settings.model.objective
    plain = [text for text, _ in texts if text.format == "text"]
    some = list(islice(plain[0].documents(), PASSKEY_DOCUMENTS)) if asked.passkey and plain else []

    def passkey(rng: random.Random, length: int) -> Row:
        ids, answers = passkey_row(rng, tokenizer, length, some)
        return Row(ids, [length], answers=answers)

    if asked.passkey:  # fail now, not in the middle of a run
        with name_key("data.passkey"):
            passkey(random.Random(settings.train.seed), min(length for _, length in lengths))
    ends = ((), ()) if objective == "causal" else frame(tokenizer)
    masking = Masking(tokenizer.mask_token_id, frozenset(tokenizer.all_special_ids), len(tokenizer), asked.mask_share)
    inputs: dict[str, Inputs] = {
        "causal": lambda row, _: causal_inputs(row),
        "masked": masking.inputs,
        "contrastive": Pairs(*ends).inputs,
    }
    return Plan(
        asked,
        stages=lengths,
        seed=settings.train.seed,
        inputs=inputs[objective],
        special=passkey if asked.passkey else None,
        frame=ends if objective == "masked" else ((), ()),
    )


def token_reader(text: Corpus, tokenizer: Any, causal: bool) -> Callable[[], Iterator[Any]]:
    """A function that starts a new pass over the examples of a text, as tokens."""
    if text.format != "text":
        read = READ[text.format]
        return lambda: (read(tokenizer, example) for example in text.documents())
    bos, eos = ([] if token is None else [token] for token in (bos_of(tokenizer, None), tokenizer.eos_token_id))

    def tokens(document: str) -> list[int]:
        ids: list[int] = tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]
        return [*bos, *ids, *eos] if causal else ids

    return lambda: filter(None, map(tokens, text.documents()))


def make_cuts(text: Corpus, weight: float, tokenizer: Any, settings: Settings) -> list[tuple[Cuts, float]]:
    """The parts of a text in memory that rows are cut from, with their weights."""
    documents = token_reader(text, tokenizer, settings.model.objective == "causal")()
    if text.format != "text":
        examples = list(documents)
        if not text.drops:
            refuse_long(examples, settings.data.length, text.name)
        return [(Examples(list(usable_examples(examples, settings.data.length)), padding_token(tokenizer)), weight)]
    if settings.data.long_documents is None:
        return [(Stream(documents), weight)]
    parts = split_by_length(documents, settings.data.long_documents)
    longest = max(settings.data.lengths)
    if len(parts) == 2 and min(len(stream) for stream, _ in parts) < longest:
        few, many = sorted(len(stream) for stream, _ in parts)
        raise PosencError(
            f"data.long_documents: of {text.name} the documents on one side of {settings.data.long_documents.tokens} "
            f"tokens have {few} together, less than a row of {longest}, and the others {many}. Name another limit."
        )
    return [(stream, weight * share) for stream, share in parts]


def make_cutter(text: Corpus, tokenizer: Any, settings: Settings) -> Cutter:
    """A cutter of rows from a text that is read while training."""
    documents = token_reader(text, tokenizer, settings.model.objective == "causal")
    if text.format == "text":
        return in_order(documents)
    return whole_examples(lambda: usable_examples(documents(), settings.data.length), padding_token(tokenizer))


def source_names(texts: Texts) -> str:
    """The names of the texts, for reports."""
    if len(texts) == 1:
        return texts[0][0].name
    return ", ".join(f"{text.name} (weight {weight:g})" for text, weight in texts)


@contextlib.contextmanager
def name_key(key: str) -> Iterator[None]:
    """Add the name of a recipe key to errors."""
    try:
        yield
    except PosencError as error:
        raise PosencError(f"{key}: {error}") from None


def padding_token(tokenizer: Any) -> int:
    return int(next(t for t in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if t is not None))


def make_measurement(settings: Settings, texts: Texts, tokenizer: Any, trained_length: int) -> Any:
    """A function that measures a model, given the model and a label."""
    lengths = settings.measure.lengths or lengths_upto(trained_length, settings.data.reach)
    if settings.measure.path is not None:
        held = load_corpus(Source(path=settings.measure.path, streaming=False), settings.data.held_out)
        kept = [*held.documents(), *held.held_out] if settings.measure.path != "stdlib" else held.held_out
    else:
        kept = [text for found, _ in texts if found.format == "text" for text in found.held_out]
        if not kept:
            raise PosencError(
                "A loss by length needs plain text, not prompts or chats: name some text (measure.path)."
            )
    documents = held_out_documents(kept, tokenizer, max(lengths), settings.measure)
    if settings.measure.passkeys and settings.model.objective == "causal":
        with name_key(f"measure.passkeys at {min(lengths)} tokens"):
            trials("passkey", min(lengths), tokenizer, Retrieval(trials=1, distractors=1))
    return partial(
        measure_model, tokenizer=tokenizer, documents=documents, lengths=lengths, asked=settings.measure,
        objective=settings.model.objective,
    )  # fmt: skip
