"""What `hf-posenc eval` and `compare` do once they are understood: they load, call and print."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers

from ..checkpoints.files import find, read_json
from ..checkpoints.save_load import load, tokenizer_of
from ..errors import PosencError
from ..evaluation.measures.haystacks import Haystacks
from ..evaluation.measures.needles import Retrieval
from ..evaluation.measures.perplexity import PROTOCOLS, Reading
from ..evaluation.measures.rows import Row
from ..evaluation.measures.texts import Document, tokenized
from ..evaluation.runs.compare import compare, doublings
from ..evaluation.runs.entries import parsed_schemes
from ..evaluation.runs.evaluate import evaluate, identity
from ..evaluation.runs.options import Options
from ..evaluation.runs.outputs import write
from ..evaluation.runs.results import Results, fingerprint
from ..evaluation.runs.standings import standings
from ..patching.lengths import trained_length
from ..patching.live import bare, is_patched
from ..runtime.rotary import hushed
from .asked import Asked
from .results import places, show, show_comparison

UNHEEDED = ("scored", "stride")
"""Options only some protocols use."""


def run_eval(asked: Asked) -> None:
    options = options_of(asked, asked.lengths)
    live, words = loaded(asked.model, asked.device, asked.dtype, asked.base), tokenizer_for(asked)
    refuse_unheeded(asked, options, is_patched(bare(live)) and bool(asked.texts))
    suite = suite_of(live, words, asked) if asked.harness else None
    rows: list[Row] = []
    run: dict[str, Any] = {}
    if options is not None:
        documents = tokenized(asked.texts, words) if asked.texts else []
        other = loaded(asked.reference, asked.device, asked.dtype, None) if asked.reference else None
        rows += evaluate(
            live, words, documents, options=options, reference=other, out=asked.out, force=asked.force,
            quiet=not sys.stderr.isatty(),
        )  # fmt: skip
        run = identity(live, words, documents, options, other)
    if suite is not None:
        rows += suite(Results(asked.out, run or fingerprint(live, words, (), {})))
    show(rows)
    write(rows, asked.json_file, asked.report, about(asked, live))


def run_compare(asked: Asked) -> None:
    entries = parsed_schemes(asked.schemes)
    live, words = loaded(asked.model, asked.device, asked.dtype, None), tokenizer_for(asked)
    options = options_of(asked, asked.lengths or doublings(trained_length(live), asked.target))
    assert options is not None
    refuse_unheeded(asked, options, taxed=True)
    documents: list[Document] = tokenized(asked.texts, words) if asked.texts else []
    rows = compare(
        live, words, entries, documents, target_length=asked.target, options=options, out=asked.out,
        force=asked.force, quiet=not sys.stderr.isatty(),
    )  # fmt: skip
    show_comparison(rows)
    ranks = {(s.protocol, s.scheme, s.length): places(s) for s in standings(rows)}
    write(rows, asked.json_file, asked.report, {**about(asked, live), "places": ranks})


def about(asked: Asked, model: Any) -> dict[str, Any]:
    return {"model": asked.model, "text": list(asked.texts), "trained_length": trained_length(model)}


def suite_of(model: Any, tokenizer: Any, asked: Asked) -> Callable[[Results], list[Row]]:
    """What runs a harness; raises now for what it would refuse later."""
    # Both libraries are extras, and slow to import.
    from ..evaluation.suites.lemb import evaluate_lemb, is_lemb, planned_lemb

    group, lengths, samples, size = asked.harness, asked.lengths, asked.samples, asked.batch_size
    if is_lemb(group):
        planned_lemb(model, tokenizer, group, lengths)
        return lambda kept: evaluate_lemb(model, tokenizer, group, lengths, batch_size=size, results=kept)
    from ..evaluation.suites.harness import evaluate_harness, planned

    planned(model, tokenizer, group, lengths, samples)
    return lambda kept: evaluate_harness(
        model, tokenizer, group, lengths, samples=samples, batch_size=size or 1, results=kept
    )


def options_of(asked: Asked, lengths: Sequence[int]) -> Options | None:
    """The options of a run; None if nothing of ours is asked for."""
    if not asked.tasks:
        return None
    reading = Reading(
        **{name: asked.given[name] for name in UNHEEDED if asked.given[name] is not None},
        windows=asked.windows,
        max_tokens=asked.max_tokens,
        truncate=asked.truncate,
        batch_size=asked.batch_size,
    )
    return Options(
        lengths=tuple(lengths),
        tasks=asked.tasks,
        haystacks=Haystacks(queries=asked.queries, documents=asked.stacks, seed=asked.seed),
        protocol=asked.protocol,
        reading=reading,
        asked=Retrieval(depths=asked.depths, trials=asked.trials, distractors=asked.distractors, seed=asked.seed),
        bos=asked.bos,
    )


def refuse_unheeded(asked: Asked, options: Options | None, taxed: bool) -> None:
    """Raise for settings that somebody gave, and no task would heed."""
    for name in UNHEEDED if options else ():
        assert options is not None
        elsewhere = name == "scored" and (taxed or "loss_by_position" in options.tasks)
        if asked.given[name] is not None and name not in PROTOCOLS[options.protocol].takes and not elsewhere:
            heeding = ", ".join(p for p, protocol in PROTOCOLS.items() if name in protocol.takes)
            raise PosencError(
                f"The protocol {options.protocol!r} does not heed --{name}; {heeding} would. Leave it out."
            )
    if options is None and asked.reference is not None:
        raise PosencError("--reference is for the short-context tax, and no task of ours is asked for. Leave it out.")


@hushed()
def loaded(path: str, device: str, dtype: str, base: str | None) -> Any:
    """The model, on its device."""
    wanted = getattr(torch, dtype) if dtype != "auto" else torch.float32 if device == "cpu" else "auto"
    transformers.utils.logging.disable_progress_bar()
    model = load(path, base=base, dtype=wanted)
    try:
        return model.to(device).eval()
    except (RuntimeError, AssertionError) as error:
        raise PosencError(f"The model cannot be put on {device!r}: {error}") from None


@hushed()
def tokenizer_for(asked: Asked) -> Any:
    """The tokenizer of a model or adapter, or the one that was named; None if there is none."""
    if asked.tokenizer is not None:
        found = tokenizer_of(asked.tokenizer)
        if found is None:
            raise PosencError(f"There is no tokenizer at {asked.tokenizer!r}.")
        return found
    adapter = find(asked.model, "adapter_config.json", {})
    base = read_json(adapter).get("base_model_name_or_path") if adapter else None
    return tokenizer_of(asked.model, asked.given.get("base"), base)
