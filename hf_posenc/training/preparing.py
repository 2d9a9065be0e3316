"""What a run is made of: the model and its tokenizer, the rows that are cut from the text, and how it is measured."""

from __future__ import annotations

import random
from functools import partial
from itertools import islice
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer, set_seed

from ..checkpoints.save_load import load
from ..evaluation.measures.texts import bos_of
from ..models import model_path
from ..patching.describe import describe
from ..patching.live import is_patched, record_of
from ..patching.patch import patch_model
from ..patching.records import Record
from .contrastive import Pairs
from .measured import frame, held_out_documents, lengths_upto, measured
from .retrieval import passkey_row
from .rows import Masking, Plan, Row, Stream, StreamedRows, TrainingRows, causal_inputs, stages
from .settings import Settings
from .sources import Corpus

AUTO: dict[str, Any] = {"causal": AutoModelForCausalLM, "masked": AutoModelForMaskedLM, "contrastive": AutoModel}
SOME = 200
"""Documents that passkeys are hidden in."""


def made(settings: Settings) -> tuple[Any, Any]:
    """The model, as it came, and its tokenizer."""
    asked = settings.model
    set_seed(settings.train.seed)  # a fresh model begins at random
    dtype, auto = getattr(torch, asked.dtype), AUTO[asked.objective]
    if asked.path is not None:
        given: dict[str, Any] = {"model_class": auto, "dtype": dtype}
        if asked.attn_implementation:
            given["attn_implementation"] = asked.attn_implementation
        if asked.trust_remote_code:
            given["trust_remote_code"] = True
        model = load(asked.path, **given)
        return model, AutoTokenizer.from_pretrained(model_path(asked.tokenizer or asked.path))
    assert asked.tokenizer is not None and asked.config is not None  # the settings see to it
    tokenizer = AutoTokenizer.from_pretrained(model_path(asked.tokenizer))
    if asked.objective == "masked" and tokenizer.mask_token_id is None:
        tokenizer.add_special_tokens({"mask_token": "<mask>"})
    sizes = {"vocab_size": len(tokenizer), **asked.config}
    model = auto.from_config(AutoConfig.for_model(sizes.pop("model_type"), **sizes), dtype=torch.float32)
    for parameter in model.parameters():  # drawn alike in any precision; frequencies are buffers, and stay in fp32
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    return model, tokenizer


def patch(settings: Settings, model: Any) -> None:
    """Give the model the positions that the recipe names, if any."""
    if settings.scheme.name is not None:
        set_seed(settings.train.seed)  # what a scheme brings may begin at random
        patch_model(model, settings.scheme.name, **settings.scheme.options)


def positions_record(model: Any) -> Record | None:
    """How the model was patched, if it was."""
    return record_of(model) if is_patched(model) else None


def positions_name(model: Any) -> str:
    """What figures of the model are shown under."""
    return str(describe(model).scheme) if is_patched(model) else "unpatched"


def training_rows(settings: Settings, text: Corpus, tokenizer: Any, a_step: int) -> TrainingRows | StreamedRows:
    """What is trained on: `a_step` rows for every step."""
    asked = settings.data
    causal = settings.model.objective == "causal"
    bos, eos = ([] if token is None else [token] for token in (bos_of(tokenizer, None), tokenizer.eos_token_id))

    def tokens(document: str) -> list[int]:
        ids = tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]
        return [*bos, *ids, *eos] if causal else ids

    some = list(islice(text.documents(), SOME)) if asked.passkey else []

    def passkey(rng: random.Random, length: int) -> Row:
        ids, answers = passkey_row(rng, tokenizer, length, some)
        return Row(ids, [length], answers=answers)

    ends = ((), ()) if causal else frame(tokenizer)
    masking = Masking(tokenizer.mask_token_id, frozenset(tokenizer.all_special_ids), len(tokenizer), asked.mask_share)
    inputs = {
        "causal": lambda row, _: causal_inputs(row),
        "masked": masking.inputs,
        "contrastive": Pairs(*ends).inputs,
    }
    plan = Plan(
        asked,
        stages=stages(asked, settings.train.max_steps, a_step),
        seed=settings.train.seed,
        inputs=inputs[settings.model.objective],
        special=passkey if asked.passkey else None,
        frame=ends if settings.model.objective == "masked" else ((), ()),
    )
    if text.streamed:
        return StreamedRows(lambda: filter(None, map(tokens, text.documents())), plan)
    return TrainingRows(Stream(map(tokens, text.documents())), plan)


def measurement(settings: Settings, text: Corpus, tokenizer: Any, trained_length: int) -> Any:
    """What takes the figures of a model, given it and a label."""
    lengths = settings.measure.lengths or lengths_upto(trained_length, settings.data.reach)
    documents = held_out_documents(text.held_out, tokenizer, max(lengths), settings.measure)
    return partial(
        measured, tokenizer=tokenizer, documents=documents, lengths=lengths, asked=settings.measure,
        objective=settings.model.objective,
    )  # fmt: skip
