"""A recipe as it is run: a model and text in, an adapter or a model with its figures and its card out.

1. `where_to_begin` finds what a run that was stopped has left.
2. `made` loads the model, `corpus` the text; `before` measures it, patches it and measures again.
3. `tuned` chooses what is trained; `training_rows` cuts the text; `ContextTrainer` trains.
4. `finish` loads what was saved, measures it, and writes the card.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import PartialState
from rich.console import Console
from rich.markdown import Markdown
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    PreTrainedModel,
    set_seed,
)

from ..checkpoints.embedders import copy_embedder
from ..checkpoints.save_load import load, merge
from ..errors import PosencError
from ..evaluation.measures.rows import Row as Figure
from ..evaluation.measures.texts import bos_of
from ..evaluation.report import write
from ..families import places
from ..models import model_path
from ..patching.describe import describe
from ..patching.measure import own_length
from ..patching.patch import is_patched, patch_model
from .card import card, command, results, versions
from .contrastive import Pairs
from .loss import LossHead, refuse_other_loss
from .manifest import newest_whole, refuse_other_settings
from .measured import frame, held_out_documents, lengths_upto, measured
from .retrieval import passkey_row
from .rows import Masking, Plan, Row, Stream, StreamedRows, TrainingRows, causal_inputs, stages, together
from .settings import Settings
from .sources import Corpus, corpus
from .trainer import (
    ContextTrainer,
    StopInTime,
    arguments,
    refuse_other_launch,
    refuse_small_batches,
    rows_a_step,
)
from .tuning import counted, tuned

AUTO = {"causal": AutoModelForCausalLM, "masked": AutoModelForMaskedLM, "contrastive": AutoModel}
SOME = 200
"""Documents that passkeys are hidden in."""
console = Console(stderr=True)


def made(settings: Settings) -> tuple[PreTrainedModel, Any]:
    """The model, as it came, and its tokenizer."""
    asked = settings.model
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
    return auto.from_config(AutoConfig.for_model(sizes.pop("model_type"), **sizes), dtype=dtype), tokenizer


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


def where_to_begin(settings: Settings, resume: bool, main_process: bool) -> Path | None:
    """The checkpoint that a run goes on from; None for a new run. Nothing that lies there is ever overwritten."""
    say = console.print if main_process else lambda *words: None
    output = Path(settings.output)
    found = newest_whole(output)
    if not resume:
        if found.checkpoint or found.damaged:
            raise PosencError(
                f"{output} holds checkpoints of a run. Go on with it (--resume), or name another --output."
            )
        return None
    for name, why in found.damaged.items():
        say(f"[yellow]{name} is not whole: {why}. It is not used.[/]")
    if found.checkpoint is None:
        if found.damaged:
            raise PosencError(f"{output} has no whole checkpoint to go on from. Begin anew with another --output.")
        say(f"{output} holds no checkpoint yet: the run begins.")
        return None
    refuse_other_settings(found.checkpoint, settings.of_run())
    say(f"Going on from {found.checkpoint}.")
    PartialState().wait_for_everyone()  # all have looked
    for name in found.damaged if main_process else ():  # the run will come by these names again
        shutil.move(output / name, output / f"damaged-{name}-{int(time.time())}")
    return found.checkpoint


def before(settings: Settings, model: PreTrainedModel, measure: Any, compared: bool) -> list[Figure]:
    """Figures of the model as it came and as it is patched; taken once, also when a run is resumed."""
    if not compared:
        patch(settings, model)
        return []
    file = Path(settings.output) / "before.json"
    if file.exists():
        patch(settings, model)
        return [Figure.from_dict(row) for row in json.loads(file.read_text())]
    found = measure(model, label="unpatched")
    if patch(settings, model):
        found += measure(model, label=settings.scheme.name)
    beside = file.with_suffix(".part")
    beside.write_text(json.dumps([figure.to_dict() for figure in found]))
    beside.replace(file)  # a kill leaves all of it, or nothing
    return found


def patch(settings: Settings, model: PreTrainedModel) -> bool:
    if settings.scheme.name is not None:
        patch_model(model, settings.scheme.name, **settings.scheme.options)
    return settings.scheme.name is not None


def refuse_misfit(settings: Settings, model: PreTrainedModel, tokenizer: Any) -> None:
    """Raise where the rows would not fit the model."""
    longest, where = settings.data.reach, places(model)
    described: Any = describe(model) if is_patched(model) else None
    reach = described.target_length if described else own_length(where) if where.has_table else None
    if reach is not None and longest > reach:
        raise PosencError(
            f"Rows reach to position {longest}, and the model is made for {reach}: raise scheme.target_length, or "
            "lower data.length."
        )
    if settings.model.objective == "masked" and tokenizer.mask_token_id is None:
        raise PosencError("model.objective: masked needs a tokenizer with a mask token, and this one has none.")
    if settings.model.objective != "causal" and settings.data.passkey:
        raise PosencError("data.passkey is for causal models.")


def measurement(settings: Settings, text: Corpus, tokenizer: Any, trained_length: int) -> Any:
    """What takes the figures of a model, given it and a label."""
    lengths = settings.measure.lengths or lengths_upto(trained_length, settings.data.reach)
    documents = held_out_documents(text.held_out, tokenizer, max(lengths), settings.measure)
    return partial(
        measured, tokenizer=tokenizer, documents=documents, lengths=lengths, asked=settings.measure,
        objective=settings.model.objective,
    )  # fmt: skip


def facts_of(trainer: ContextTrainer, result: Any, tokens: int) -> dict[str, Any]:
    """What a run was, for its metrics and its card."""
    model: Any = trainer.model
    trained, parameters = counted(model)
    return {
        "steps": result.global_step,
        "tokens_a_step": tokens,
        "training_seconds": result.metrics["train_runtime"],
        "train_loss": result.training_loss,
        "losses": [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry],
        "trained": trained,
        "parameters": parameters,
        "processes": trainer.args.world_size,
        "distributed": str(trainer.accelerator.distributed_type),
        "command": command(),
        "versions": versions(),
    }


def train(settings: Settings, resume: bool, merged: bool, compared: bool = True) -> list[Figure]:
    """A whole run; its figures. Unless `compared`, only what comes out of it is measured."""
    started = time.monotonic()
    args = arguments(settings)  # from here on there are as many processes as were launched
    main_process = args.process_index == 0
    output = Path(settings.output)
    begin = where_to_begin(settings, resume, main_process)
    output.mkdir(parents=True, exist_ok=True)

    set_seed(settings.train.seed)  # a fresh model begins at random
    model: Any
    model, tokenizer = made(settings)
    text = corpus(settings.data)
    trained_length = own_length(places(model)) or settings.data.length
    measure = measurement(settings, text, tokenizer, trained_length)
    figures: list[Figure] = []
    if main_process:
        figures = before(settings, model.to(args.device), measure, compared)
        (output / "recipe.yaml").write_text(yaml.safe_dump(settings.model_dump(), sort_keys=False))
    else:
        patch(settings, model)
    refuse_misfit(settings, model, tokenizer)

    set_seed(settings.train.seed)  # and so do adapters, which all processes must draw alike
    wrapped = tuned(model, settings.tune, settings.model.objective)
    a_step = rows_a_step(args)
    dataset = training_rows(settings, text, tokenizer, a_step)
    head = None if settings.train.full_logits or settings.model.objective == "contrastive" else LossHead(model)
    if head is not None:
        refuse_other_loss(model, head, together([next(iter(dataset))]), settings.model.objective == "causal")
    trainer = ContextTrainer(
        settings=settings, head=head, other_rate=settings.tune.learning_rate, model=wrapped, args=args,
        train_dataset=dataset, processing_class=tokenizer,
        callbacks=[StopInTime(settings.train.max_seconds)] if settings.train.max_seconds else None,
    )  # fmt: skip
    refuse_other_launch(settings, trainer, int(os.environ.get("WORLD_SIZE", 1)))
    refuse_small_batches(settings, trainer)
    if main_process:
        trained, parameters = counted(wrapped)
        console.print(f"{trained:,} of {parameters:,} parameters are trained, by {args.world_size} process(es).")
    result = trainer.train(resume_from_checkpoint=None if begin is None else str(begin))

    folder = output / ("adapter" if hasattr(wrapped, "peft_config") else "model")
    trainer.save_model(str(folder))
    facts = facts_of(trainer, result, a_step * settings.data.length)  # counted by all, since parameters may be sharded
    if main_process:
        facts |= {"data": text.name, "seconds": time.monotonic() - started, "trained_length": trained_length}
        finish(settings, folder, merged, figures, measure, facts)
    trainer.accelerator.wait_for_everyone()
    return figures


def finish(
    settings: Settings, folder: Path, merged: bool, figures: list[Figure], measure: Any, facts: dict[str, Any]
) -> None:
    """Load what was saved, measure it, and write the card, the table and the picture."""
    output = Path(settings.output)
    if settings.model.path is not None and folder.name == "model":
        copy_embedder(Path(model_path(settings.model.path)), folder, settings.data.reach)
    label = f"{settings.scheme.name or 'unpatched'}, tuned"
    dtype = getattr(torch, settings.model.dtype)  # a checkpoint may be stored in less
    reloaded = load(
        folder, dtype=dtype, model_class=AUTO[settings.model.objective] if folder.name == "model" else None
    )
    figures += measure(reloaded, label=label)
    about = {
        "title": f"{settings.model.path or 'a fresh model'} with {settings.scheme.name or 'its own positions'}",
        "trained_length": facts["trained_length"],
        "command": facts["command"],
        "versions": facts["versions"],
    }
    (output / "metrics.json").write_text(
        json.dumps({"facts": facts, "figures": [figure.to_dict() for figure in figures]}, indent=1)
    )
    for suffix in (".md", ".png"):
        write(figures, output / f"metrics{suffix}", about)
    said = card(settings, figures, facts)
    (folder / "README.md").write_text(said)
    if merged:
        merge(folder, output / "merged", dtype=dtype)
        (output / "merged" / "README.md").write_text(said)
    console.print(Markdown(results(figures)))
    console.print(f"Written to {output}: {', '.join(sorted(path.name for path in output.iterdir()))}.")
