"""`hf-posenc eval` and `hf-posenc compare`: what may be typed."""

from __future__ import annotations

from typing import Annotated

import typer

from ..core.lengths import parsed_length, parsed_lengths
from .names import DTYPES, HARNESSES, PROTOCOLS, TASKS, complete_list, scheme_names
from .request import parse_request, refuse_unknown_schemes

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint or adapter: folder, hub name, or `tiny`.")]
Text = Annotated[
    list[str] | None,
    typer.Option(metavar="FILE", help="A text file, a folder, or a pattern in quotes; more than once."),
]
Tasks = Annotated[
    str | None,
    typer.Option(
        metavar="TASKS",
        help="perplexity, loss_by_position, shift, passkey, multikey, multivalue, json_kv, first_sentence; for "
        "encoders embed_passkey, embed_needle; with commas.",
        autocompletion=lambda incomplete: complete_list(incomplete, TASKS),
    ),
]
ProtocolName = Annotated[
    str,
    typer.Option(
        help="last, sliding, whole or yarn.", autocompletion=lambda incomplete: complete_list(incomplete, PROTOCOLS)
    ),
]
Windows = Annotated[
    int | None, typer.Option(help="Of `last`, loss_by_position and shift; 20 or what the text has room for.")
]
Scored = Annotated[int | None, typer.Option(help="Tokens at the end of windows of `last` and shift; 64 unless given.")]
Stride = Annotated[int | None, typer.Option(help="Of `sliding` and `yarn`; 256 unless given.")]
MaxTokens = Annotated[str | None, typer.Option(help="Of each document, for `sliding` and `yarn`; all unless given.")]
Truncate = Annotated[bool, typer.Option("--truncate", help="`yarn` over one window a document.")]
Bos = Annotated[bool | None, typer.Option("--bos/--no-bos", help="Open windows with BOS; as the tokenizer does.")]
Depths = Annotated[str, typer.Option(help="Of needles, from 0 to 1, with commas.")]
Trials = Annotated[int, typer.Option(help="At each depth.")]
Distractors = Annotated[int, typer.Option(help="That an answer must be likelier than.")]
Queries = Annotated[int, typer.Option(help="Of embed_ tasks at each length.")]
Stacks = Annotated[int, typer.Option("--documents", help="That queries of embed_ tasks choose from.")]
Seed = Annotated[int, typer.Option(help="Of the trials.")]
Json = Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write all rows there.")]
Report = Annotated[str | None, typer.Option(metavar="FILE", help="Write a page (.html), a picture (.png) or .md.")]
Out = Annotated[
    str | None, typer.Option(metavar="FILE", help="JSONL that results are appended to, and a run goes on from.")
]
Dtype = Annotated[
    str,
    typer.Option(
        help="float32, bfloat16, float16; auto: float32 on a CPU, else the checkpoint's.",
        autocompletion=lambda incomplete: complete_list(incomplete, DTYPES),
    ),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps; the fastest there is, unless given.")]
DeviceMap = Annotated[
    str | None, typer.Option(metavar="auto", help="Share the layers out among all devices; for large models.")
]
Step = Annotated[
    str | None, typer.Option(metavar="LENGTH", help="Read so many tokens at a time over a cache: less memory.")
]
BatchSize = Annotated[int | None, typer.Option(help="Texts that go through the model at once.")]
Tokenizer = Annotated[str | None, typer.Option(help="Where the tokenizer is, if not with the model.")]
Force = Annotated[bool, typer.Option("--force", help="Go on though memory may not suffice.")]


def eval_command(
    model: Model,
    lengths: Annotated[str, typer.Option(metavar="LENGTHS", help="In tokens, with commas: 2k,4k,8k.")],
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
    harness: Annotated[
        str | None,
        typer.Option(
            help="ruler, ruler_offline, longbench, babilong, lemb, or tasks of theirs.",
            autocompletion=lambda incomplete: complete_list(incomplete, HARNESSES),
        ),
    ] = None,
    samples: Annotated[int, typer.Option(help="Of each harness task and length.")] = 50,
    base: Annotated[str | None, typer.Option(help="The base model of an adapter, if it has moved.")] = None,
    reference: Annotated[str | None, typer.Option(help="What the short-context tax is measured against.")] = None,
    json_file: Json = None,
    report: Report = None,
    out: Out = None,
    dtype: Dtype = "auto",
    device: Device = None,
    device_map: DeviceMap = None,
    step: Step = None,
    batch_size: BatchSize = None,
    tokenizer: Tokenizer = None,
    force: Force = False,
) -> None:
    """Measure how far a checkpoint, adapter or hub model can read.

    \b
    hf-posenc eval tiny --lengths 256,512,1k --tasks passkey
    hf-posenc eval MODEL --lengths 2k,4k --text 'books/*.txt' --report out.html --out run.jsonl
    hf-posenc eval MODEL --lengths 4k,8k --harness ruler_offline
    """
    asked = parse_request(locals(), parsed_lengths(lengths), "" if harness else "perplexity")
    from .run_evaluation import run_eval

    run_eval(asked)


def compare_command(
    model: Model,
    schemes: Annotated[
        str,
        typer.Option(
            metavar="SCHEMES",
            help="With commas, options behind a colon: none,linear,yarn:factor=4,beta_fast=16.",
            autocompletion=lambda incomplete: complete_list(incomplete, scheme_names()),
        ),
    ],
    target_length: Annotated[str, typer.Option(metavar="LENGTH", help="That schemes reach for: 16k.")],
    text: Text = None,
    lengths: Annotated[
        str | None, typer.Option(metavar="LENGTHS", help="Unless given: the trained length, twice it, ...")
    ] = None,
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
    device: Device = None,
    device_map: DeviceMap = None,
    step: Step = None,
    batch_size: BatchSize = None,
    tokenizer: Tokenizer = None,
    force: Force = False,
) -> None:
    """Patch one model with each scheme in turn, and rank them as far as error bars allow.

    \b
    hf-posenc compare tiny --schemes ntk,yarn --target-length 1k --text book.txt
    hf-posenc compare MODEL --schemes none,yarn:beta_fast=16,self_extend --target-length 16k --text 'books/*.txt'
    """
    refuse_unknown_schemes(schemes)
    reached = parsed_lengths(lengths) if lengths else []
    asked = parse_request(locals(), reached, "perplexity", parsed_length(target_length))
    from .run_evaluation import run_compare

    run_compare(asked)
