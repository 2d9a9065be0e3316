"""`hf-posenc eval` and `compare` after their arguments are parsed: load the model, measure and print."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers

from ..checkpoints.files import find, read_json
from ..checkpoints.load import load
from ..checkpoints.tokenizers import tokenizer_of
from ..errors import PosencError
from ..evaluation.measures.haystacks import Haystacks
from ..evaluation.measures.needles import Retrieval
from ..evaluation.measures.perplexity import PROTOCOLS, Reading
from ..evaluation.measures.processes import Processes, launched_processes
from ..evaluation.measures.rows import Row
from ..evaluation.measures.texts import Document, tokenized
from ..evaluation.runs.compare import compare, doublings
from ..evaluation.runs.entries import parsed_schemes
from ..evaluation.runs.evaluate import evaluate, identity
from ..evaluation.runs.options import Options
from ..evaluation.runs.outputs import write
from ..evaluation.runs.results import Results, fingerprint
from ..evaluation.runs.standings import standings
from ..evaluation.runs.verdict import verdict
from ..patching.lengths import trained_length
from ..patching.patch_state import is_patched, unwrap_model
from ..runtime.rotary import hush_transformers
from .request import Request
from .results import print_comparison, print_rows, rank_range

PROTOCOL_OPTIONS = ("scored", "stride")
"""Options that only some protocols use."""


def run_eval(asked: Request) -> None:
    options, shared = make_options(asked, asked.lengths), launched_processes()
    device = choose_device(asked.device, asked.device_map, shared)
    live, words = load_model(asked.model, device, asked.dtype, asked.base), tokenizer_for(asked)
    refuse_unused_options(asked, options, is_patched(unwrap_model(live)) and bool(asked.texts))
    suite = make_suite(live, words, asked, shared) if asked.harness else None
    rows: list[Row] = []
    run: dict[str, Any] = {}
    if options is not None:
        documents = tokenized(asked.texts, words) if asked.texts else []
        other = load_model(asked.reference, device, asked.dtype, None) if asked.reference else None
        rows += evaluate(
            live, words, documents, options=options, reference=other, out=asked.out, force=asked.force,
            quiet=hides_progress(shared), shared=shared,
        )  # fmt: skip
        run = identity(live, words, documents, options, other)
    if suite is not None:
        rows += suite(Results(asked.out, run or fingerprint(live, words, (), {}), shared))
    if shared.first:
        print_rows(rows)
        write(rows, asked.json_file, asked.report, report_facts(asked, live, rows))


def run_compare(asked: Request) -> None:
    entries = parsed_schemes(asked.schemes)
    shared = launched_processes()
    device = choose_device(asked.device, asked.device_map, shared)
    live, words = load_model(asked.model, device, asked.dtype, None), tokenizer_for(asked)
    options = make_options(asked, asked.lengths or doublings(trained_length(live), asked.target))
    assert options is not None
    refuse_unused_options(asked, options, taxed=True)
    documents: list[Document] = tokenized(asked.texts, words) if asked.texts else []
    rows = compare(
        live, words, entries, documents, target_length=asked.target, options=options, out=asked.out,
        force=asked.force, quiet=hides_progress(shared), shared=shared,
    )  # fmt: skip
    if not shared.first:
        return
    print_comparison(rows)
    ranks = {(s.protocol, s.scheme, s.length): rank_range(s) for s in standings(rows)}
    write(rows, asked.json_file, asked.report, {**report_facts(asked, live, rows), "places": ranks})


def report_facts(asked: Request, model: Any, rows: Sequence[Row]) -> dict[str, Any]:
    found = {"model": asked.model, "text": list(asked.texts), "trained_length": trained_length(model)}
    return {**found, "target_length": asked.target or None, "verdict": verdict(rows)}


def make_suite(model: Any, tokenizer: Any, asked: Request, shared: Processes) -> Callable[[Results], list[Row]]:
    """A function that runs a harness. What the harness would refuse is refused now."""
    # Both libraries are extras, and slow to import.
    from ..evaluation.suites.lemb import evaluate_lemb, is_lemb, plan_lemb

    group, lengths, samples, size = asked.harness, asked.lengths, asked.samples, asked.batch_size
    if is_lemb(group):
        refuse_several_processes(group, shared)
        plan_lemb(model, tokenizer, group, lengths)
        return lambda kept: evaluate_lemb(model, tokenizer, group, lengths, batch_size=size, results=kept)
    from ..evaluation.suites.harness import evaluate_harness, plan_harness

    plan_harness(model, tokenizer, group, lengths, samples)
    return lambda kept: evaluate_harness(
        model, tokenizer, group, lengths, samples=samples, batch_size=size or 1, results=kept, shared=shared
    )


def make_options(asked: Request, lengths: Sequence[int]) -> Options | None:
    """The options of a run; None if only a harness runs."""
    if not asked.tasks:
        return None
    reading = Reading(
        **{name: asked.given[name] for name in PROTOCOL_OPTIONS if asked.given[name] is not None},
        windows=asked.windows,
        max_tokens=asked.max_tokens,
        truncate=asked.truncate,
        batch_size=asked.batch_size,
        step=asked.step,
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


def refuse_unused_options(asked: Request, options: Options | None, taxed: bool) -> None:
    """Raise for options that were given and would have no effect."""
    for name in PROTOCOL_OPTIONS if options else ():
        assert options is not None
        elsewhere = name == "scored" and (taxed or bool({"loss_by_position", "shift"} & set(options.tasks)))
        if asked.given[name] is not None and name not in PROTOCOLS[options.protocol].takes and not elsewhere:
            heeding = ", ".join(p for p, protocol in PROTOCOLS.items() if name in protocol.takes)
            raise PosencError(
                f"The protocol {options.protocol!r} does not use --{name}; {heeding} would. Leave it out."
            )
    if options is None and asked.reference is not None:
        raise PosencError("--reference is for the short-context tax, which a harness does not measure. Leave it out.")


def hides_progress(shared: Processes) -> bool:
    return not shared.first or not sys.stderr.isatty()


def refuse_several_processes(group: str, shared: Processes) -> None:
    """Raise for a harness that cannot be split between processes."""
    if shared.count > 1:
        raise PosencError(
            f"Each of {shared.count} processes would run all of {group!r} through MTEB: measure it in one process, "
            "and other tasks in several."
        )


def choose_device(device: str | None, device_map: str | None = None, shared: Processes | None = None) -> str:
    """The device to run on: the one that was asked for, or else the fastest. Prints the choice."""
    shared = shared or launched_processes()
    if device_map is not None and shared.count > 1:
        raise PosencError(
            "--device-map spreads one model over all devices, and each process would do so: start one process."
        )
    found = device_map or device or fastest_device(shared)
    if shared.first:
        threads = f", threads of each: {torch.get_num_threads()}" if found == "cpu" else ""
        among = f"{shared.count} processes on " if shared.count > 1 else ""
        print(f"Measuring on {among}{found}{threads}.", file=sys.stderr)
    return found


def fastest_device(shared: Processes) -> str:
    """An accelerator if there is one, a different one for each process; else the CPU."""
    if not torch.accelerator.is_available():
        return "cpu"
    return str(shared.state.device) if shared.state is not None else str(torch.accelerator.current_accelerator())


@hush_transformers()
def load_model(path: str, device: str, dtype: str, base: str | None) -> Any:
    """Load a model onto a device; `auto` spreads its layers over all devices."""
    wanted = getattr(torch, dtype) if dtype != "auto" else torch.float32 if device == "cpu" else "auto"
    transformers.utils.logging.disable_progress_bar()
    if device == "auto":
        return load(path, base=base, dtype=wanted, device_map="auto").eval()
    model = load(path, base=base, dtype=wanted)
    try:
        return model.to(device).eval()
    except (RuntimeError, AssertionError) as error:
        raise PosencError(f"The model cannot be put on {device!r}: {error}") from None


@hush_transformers()
def tokenizer_for(asked: Request) -> Any:
    """The tokenizer that was named, or that of the model or adapter; None if there is none."""
    if asked.tokenizer is not None:
        found = tokenizer_of(asked.tokenizer)
        if found is None:
            raise PosencError(f"There is no tokenizer at {asked.tokenizer!r}.")
        return found
    adapter = find(asked.model, "adapter_config.json", {})
    base = read_json(adapter).get("base_model_name_or_path") if adapter else None
    return tokenizer_of(asked.model, asked.given.get("base"), base)
