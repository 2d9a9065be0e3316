"""`hf-posenc eval` and `hf-posenc compare`: they load, call and print."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table

from ..checkpoints.files import find, read_json
from ..checkpoints.save_load import load, tokenizer_of
from ..errors import PosencError, suggestion
from ..evaluation.measures.haystacks import Haystacks
from ..evaluation.measures.needles import Retrieval
from ..evaluation.measures.perplexity import PROTOCOLS, Reading
from ..evaluation.measures.rows import Row
from ..evaluation.measures.texts import parsed_length, parsed_lengths, read_documents
from ..evaluation.runs.compare import compare, doublings
from ..evaluation.runs.evaluate import evaluate, identity
from ..evaluation.runs.options import TASKS, Options
from ..evaluation.runs.outputs import refuse_outputs, write
from ..evaluation.runs.results import Results, fingerprint
from ..evaluation.runs.standings import Standing, standings
from ..patching.lengths import trained_length
from ..patching.live import bare, is_patched
from ..runtime.rotary import hushed

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
UNHEEDED = ("scored", "stride")
"""Settings with a default, that not all protocols heed."""

Model = Annotated[str, typer.Argument(help="a checkpoint or adapter: directory or hub name")]
Text = Annotated[list[str] | None, typer.Option(help="a text file, a document each; more than once")]
Tasks = Annotated[
    str | None,
    typer.Option(
        help="perplexity, loss_by_position, passkey, multikey, multivalue, first_sentence; for encoders "
        "embed_passkey, embed_needle; with commas"
    ),
]
ProtocolName = Annotated[str, typer.Option(help="last, sliding, whole or yarn")]
Windows = Annotated[int | None, typer.Option(help="of `last`; 20 or what the text has room for, unless given")]
Scored = Annotated[int | None, typer.Option(help="tokens at the end of each window of `last`; 64 unless given")]
Stride = Annotated[int | None, typer.Option(help="of `sliding` and `yarn`; 256 unless given")]
MaxTokens = Annotated[str | None, typer.Option(help="of each document, for `sliding` and `yarn`; all unless given")]
Truncate = Annotated[bool, typer.Option("--truncate", help="`yarn` over one window a document")]
Bos = Annotated[bool | None, typer.Option("--bos/--no-bos", help="open windows with BOS; as the tokenizer does")]
Depths = Annotated[str, typer.Option(help="of needles, from 0 to 1, with commas")]
Trials = Annotated[int, typer.Option(help="at each depth")]
Distractors = Annotated[int, typer.Option(help="that an answer must be likelier than")]
Queries = Annotated[int, typer.Option(help="of embed_ tasks at each length")]
Stacks = Annotated[int, typer.Option("--documents", help="that queries of embed_ tasks choose from")]
Seed = Annotated[int, typer.Option(help="of the trials")]
Json = Annotated[str | None, typer.Option("--json", help="write all rows there")]
Report = Annotated[str | None, typer.Option(help="write a page (.html), a picture (.png) or .md")]
Out = Annotated[str | None, typer.Option(help="JSONL that results are appended to, and a run goes on from")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16; auto: float32 on a CPU, else the checkpoint's")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")]
BatchSize = Annotated[int | None, typer.Option(help="texts that go through the model at once")]
Tokenizer = Annotated[str | None, typer.Option(help="where the tokenizer is, if not with the model")]
Force = Annotated[bool, typer.Option("--force", help="go on though memory may not suffice")]


def eval_command(
    model: Model,
    lengths: Annotated[str, typer.Option(help="in tokens, with commas: 2k,4k,8k")],
    text: Text = None,
    tasks: Tasks = None,
    protocol: ProtocolName = "last",
    windows: Windows = None,
    scored: Scored = None,
    stride: Stride = None,
    max_tokens: MaxTokens = None,
    truncate: Truncate = False,
    bos: Bos = None,
    depths: Depths = "0,0.25,0.5,0.75,1",
    trials: Trials = 10,
    distractors: Distractors = 9,
    queries: Queries = 50,
    stacks: Stacks = 100,
    seed: Seed = 0,
    harness: Annotated[str | None, typer.Option(help="ruler, longbench, babilong, lemb, or tasks of theirs")] = None,
    samples: Annotated[int, typer.Option(help="of each harness task and length")] = 50,
    base: Annotated[str | None, typer.Option(help="the base model of an adapter, if it has moved")] = None,
    reference: Annotated[str | None, typer.Option(help="what the short-context tax is measured against")] = None,
    json_file: Json = None,
    report: Report = None,
    out: Out = None,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    batch_size: BatchSize = None,
    tokenizer: Tokenizer = None,
    force: Force = False,
) -> None:
    """Measure how far a checkpoint, adapter or hub model can read."""
    given, reached = locals(), parsed_lengths(lengths)
    options = chosen(given, reached, "" if harness else "perplexity")
    refuse_outputs(json_file, report, out)
    live, words = loaded(model, device, dtype, base), tokenizer_for(model, tokenizer, base)
    refuse_unheeded(given, options, is_patched(bare(live)) and bool(text))
    suite = suite_of(live, words, harness, reached, samples, batch_size) if harness else None
    rows: list[Row] = []
    run: dict[str, Any] = {}
    if options is not None:
        documents = read_documents(text, words) if text else []
        other = loaded(reference, device, dtype, None) if reference else None
        rows += evaluate(
            live, words, documents, options=options, reference=other, out=out, force=force,
            quiet=not sys.stderr.isatty(),
        )  # fmt: skip
        run = identity(live, words, documents, options, other)
    if suite is not None:
        rows += suite(Results(out, run or fingerprint(live, words, (), {})))
    show(rows)
    write(rows, json_file, report, {"model": model, "text": text, "trained_length": trained_length(live)})


def compare_command(
    model: Model,
    schemes: Annotated[str, typer.Option(help="none,linear,yarn:factor=4,beta_fast=16; see `hf-posenc schemes`")],
    target_length: Annotated[str, typer.Option(help="that schemes reach for: 16k")],
    text: Text = None,
    lengths: Annotated[str | None, typer.Option(help="unless given: the trained length, twice it, ...")] = None,
    tasks: Tasks = None,
    protocol: ProtocolName = "last",
    windows: Windows = None,
    scored: Scored = None,
    stride: Stride = None,
    max_tokens: MaxTokens = None,
    truncate: Truncate = False,
    bos: Bos = None,
    depths: Depths = "0,0.25,0.5,0.75,1",
    trials: Trials = 10,
    distractors: Distractors = 9,
    queries: Queries = 50,
    stacks: Stacks = 100,
    seed: Seed = 0,
    json_file: Json = None,
    report: Report = None,
    out: Out = None,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    batch_size: BatchSize = None,
    tokenizer: Tokenizer = None,
    force: Force = False,
) -> None:
    """Patch one model with each scheme in turn, and rank them as far as error bars allow."""
    given = locals()
    refuse_outputs(json_file, report, out)
    live, words = loaded(model, device, dtype, None), tokenizer_for(model, tokenizer, None)
    target = parsed_length(target_length)
    reached = parsed_lengths(lengths) if lengths else doublings(trained_length(live), target)
    options = chosen(given, reached, "perplexity")
    refuse_unheeded(given, options, taxed=True)
    documents = read_documents(text or [], words) if text or not (options and options.embeds) else []
    rows = compare(
        live, words, schemes, documents, target_length=target, options=options, out=out,
        force=force, quiet=not sys.stderr.isatty(),
    )  # fmt: skip
    show([row for row in rows if row.task not in ("perplexity", "tax")])
    show_standings(rows)
    ranks = {(s.protocol, s.scheme, s.length): places(s) for s in standings(rows)}
    about = {"model": model, "text": text, "trained_length": trained_length(live), "places": ranks}
    write(rows, json_file, report, about)


COMMANDS: dict[str, Callable[..., None]] = {"eval": eval_command, "compare": compare_command}


def suite_of(
    model: Any, tokenizer: Any, group: str, lengths: Sequence[int], samples: int, batch_size: int | None
) -> Callable[[Results], list[Row]]:
    """What runs a harness; raises now for what it would refuse later."""
    from ..evaluation.suites.lemb import (
        evaluate_lemb,
        is_lemb,
        planned_lemb,
    )  # both libraries are slow to import, and extras

    if is_lemb(group):
        planned_lemb(model, tokenizer, group, lengths)
        return lambda kept: evaluate_lemb(model, tokenizer, group, lengths, batch_size=batch_size, results=kept)
    from ..evaluation.suites.harness import evaluate_harness, planned

    planned(model, tokenizer, group, lengths, samples)
    return lambda kept: evaluate_harness(
        model, tokenizer, group, lengths, samples=samples, batch_size=batch_size or 1, results=kept
    )


def chosen(given: Mapping[str, Any], lengths: Sequence[int], tasks: str) -> Options | None:
    """The options of a command; None if nothing of ours is asked for."""
    names = tuple(filter(None, (name.strip() for name in (given["tasks"] or tasks).split(","))))
    if not names and not given.get("harness"):
        raise PosencError(
            f"--tasks {given['tasks']!r} names no task. Take some of {', '.join(TASKS)}, or leave it out."
        )
    if not names:
        return None
    reading = Reading(
        **{name: given[name] for name in UNHEEDED if given[name] is not None},
        windows=given["windows"],
        max_tokens=parsed_length(given["max_tokens"]) if given["max_tokens"] else None,
        truncate=given["truncate"],
        batch_size=given["batch_size"],
    )
    try:
        depths = tuple(float(depth) for depth in given["depths"].split(","))
    except ValueError:
        raise PosencError(f"--depths takes numbers from 0 to 1 with commas, got {given['depths']!r}.") from None
    asked = Retrieval(depths=depths, trials=given["trials"], distractors=given["distractors"], seed=given["seed"])
    hidden = Haystacks(queries=given["queries"], documents=given["stacks"], seed=given["seed"])
    return Options(
        lengths=tuple(lengths),
        tasks=names,
        haystacks=hidden,
        protocol=given["protocol"],
        reading=reading,
        asked=asked,
        bos=given["bos"],
    )


def refuse_unheeded(given: Mapping[str, Any], options: Options | None, taxed: bool) -> None:
    """Raise for settings that somebody gave, and no task would heed."""
    for name in UNHEEDED if options else ():
        assert options is not None
        elsewhere = name == "scored" and (taxed or "loss_by_position" in options.tasks)
        if given[name] is not None and name not in PROTOCOLS[options.protocol].takes and not elsewhere:
            heeding = ", ".join(p for p, protocol in PROTOCOLS.items() if name in protocol.takes)
            raise PosencError(
                f"The protocol {options.protocol!r} does not heed --{name}; {heeding} would. Leave it out."
            )
    if options is None and given["reference"] is not None:
        raise PosencError("--reference is for the short-context tax, and no task of ours is asked for. Leave it out.")


@hushed()
def loaded(path: str, device: str, dtype: str, base: str | None) -> Any:
    """The model, on its device."""
    if dtype not in (*DTYPES, "auto"):
        raise PosencError(f"Unknown dtype {dtype!r}.{suggestion(dtype, [*DTYPES, 'auto'])}")
    wanted = DTYPES.get(dtype, torch.float32 if device == "cpu" else "auto")
    transformers.utils.logging.disable_progress_bar()
    model = load(path, base=base, dtype=wanted)
    try:
        return model.to(device).eval()
    except (RuntimeError, AssertionError) as error:
        raise PosencError(f"The model cannot be put on {device!r}: {error}") from None


@hushed()
def tokenizer_for(path: str, given: str | None, base: str | None) -> Any:
    """The tokenizer of a model or adapter, or the one that was named; None if there is none."""
    if given is not None:
        found = tokenizer_of(given)
        if found is None:
            raise PosencError(f"There is no tokenizer at {given!r}.")
        return found
    adapter = find(path, "adapter_config.json", {})
    return tokenizer_of(path, base, read_json(adapter).get("base_model_name_or_path") if adapter else None)


def number(value: float, error: float | None) -> str:
    return f"{value:.4f}" if error is None else f"{value:.4f} ±{error:.4f}"


def show(rows: Sequence[Row]) -> None:
    """A line for each row; a perplexity stands beside its loss."""
    table = Table("task", "protocol", "scheme", "length", "depth", "metric", "value ±stderr", "n", box=None)
    for column in table.columns[:3]:
        column.overflow = "fold"  # names are never cut
    for row in rows:
        depth = row.details.get("depth", "")
        value = number(row.value, row.stderr)
        table.add_row(row.task, row.protocol, row.scheme, str(row.length), str(depth), row.metric, value, str(row.n))
    if rows:
        Console().print(table)


def places(standing: Standing) -> str:
    """`2`, or `2-4` where others cannot be told apart."""
    return f"{standing.rank}" if standing.rank == standing.lowest else f"{standing.rank}-{standing.lowest}"


def show_standings(rows: Sequence[Row]) -> None:
    """Schemes by lengths, with ranks; and what each costs in the short."""
    found = {(s.task, s.protocol, s.scheme, s.length): s for s in standings(rows)}
    taxes = {(row.scheme, row.length): number(row.value, row.stderr) for row in rows if row.task == "tax"}
    console = Console()
    for task, protocol in dict.fromkeys((key[0], key[1]) for key in found):
        lengths = sorted({key[3] for key in found if key[:2] == (task, protocol)})
        table = Table("loss (places)", *map(str, lengths), box=None)
        table.columns[0].overflow = "fold"
        for scheme in dict.fromkeys(key[2] for key in found):
            cells = [found.get((task, protocol, scheme, length)) for length in lengths]
            table.add_row(scheme, *(f"{number(s.value, s.stderr)} ({places(s)})" if s else "-" for s in cells))
        console.print(f"\n{task}, {protocol}; in brackets the places that error bars leave a scheme: after those that")
        console.print(
            "are clearly better, before those clearly worse (paired windows, 95 % over all pairs of a length)."
        )
        console.print(table)
    if taxes:
        lengths = sorted({length for _, length in taxes})
        table = Table("short-context tax", *map(str, lengths), box=None)
        for scheme in dict.fromkeys(scheme for scheme, _ in taxes):
            table.add_row(scheme, *(taxes.get((scheme, length), "-") for length in lengths))
        console.print("\nLoss above the unpatched model's, at and below the trained length, paired:")
        console.print(table)
