"""`hf-posenc eval` and `hf-posenc compare`: their arguments."""

from __future__ import annotations

from typing import Annotated

import typer

from ..core.lengths import parsed_length, parsed_lengths
from .names import DTYPES, HARNESSES, PROTOCOLS, TASKS, complete_list, scheme_names
from .request import parse_request, refuse_unknown_schemes

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint or adapter: folder, hub name, or `tiny`.")]
Text = Annotated[
    list[str] | None,
    typer.Option(metavar="FILE", help="A text file, a folder, or a quoted pattern; may be repeated."),
]
Tasks = Annotated[
    str | None,
    typer.Option(
        metavar="TASKS",
        help="Separated by commas: perplexity, loss_by_position, shift, passkey, multikey, multivalue, json_kv, "
        "first_sentence; for encoders embed_passkey, embed_needle.",
        autocompletion=lambda incomplete: complete_list(incomplete, TASKS),
    ),
]
ProtocolName = Annotated[
    str,
    typer.Option(
        help="How perplexity is measured: last, sliding, whole or yarn.",
        autocompletion=lambda incomplete: complete_list(incomplete, PROTOCOLS),
    ),
]
Windows = Annotated[
    int | None,
    typer.Option(help="Number of windows, for `last`, loss_by_position and shift. Default: 20, or as many as fit."),
]
Scored = Annotated[
    int | None, typer.Option(help="Scored tokens at the end of each window, for `last` and shift. Default: 64.")
]
Stride = Annotated[int | None, typer.Option(help="Stride of the windows of `sliding` and `yarn`. Default: 256.")]
MaxTokens = Annotated[
    str | None, typer.Option(help="Read only so many tokens of each document, for `sliding` and `yarn`. Default: all.")
]
Truncate = Annotated[bool, typer.Option("--truncate", help="For `yarn`: read only one window of each document.")]
Bos = Annotated[
    bool | None, typer.Option("--bos/--no-bos", help="Start windows with BOS. Default: as the tokenizer does.")
]
Depths = Annotated[str, typer.Option(help="Where needles are hidden, from 0 (start) to 1 (end).")]
Trials = Annotated[int, typer.Option(help="Number of trials at each depth.")]
Distractors = Annotated[int, typer.Option(help="Number of wrong answers that the right one is compared with.")]
Queries = Annotated[int, typer.Option(help="Number of queries of embed_ tasks at each length.")]
Stacks = Annotated[int, typer.Option("--documents", help="Number of documents that embed_ tasks search.")]
Seed = Annotated[int, typer.Option(help="Random seed of the trials.")]
Json = Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write all results to this file.")]
Report = Annotated[str | None, typer.Option(metavar="FILE", help="Write a report: .html, .png or .md.")]
Out = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Append each result to this JSONL file; the same command resumes from it."),
]
Dtype = Annotated[
    str,
    typer.Option(
        help="float32, bfloat16, float16; auto: float32 on a CPU, else the dtype of the checkpoint.",
        autocompletion=lambda incomplete: complete_list(incomplete, DTYPES),
    ),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps. Default: the fastest one.")]
DeviceMap = Annotated[
    str | None, typer.Option(metavar="auto", help="Spread the layers over all devices, for large models.")
]
Step = Annotated[
    str | None, typer.Option(metavar="LENGTH", help="Read so many tokens at a time with a KV cache, to save memory.")
]
BatchSize = Annotated[int | None, typer.Option(help="Texts in one batch.")]
Tokenizer = Annotated[
    str | None, typer.Option(help="Folder or hub name of the tokenizer, if it is not with the model.")
]
Force = Annotated[bool, typer.Option("--force", help="Run even if there may not be enough memory.")]


def eval_command(
    model: Model,
    lengths: Annotated[str, typer.Option(metavar="LENGTHS", help="Lengths in tokens, separated by commas: 2k,4k,8k.")],
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
            help="A benchmark: ruler, ruler_offline, longbench, babilong, lemb, or single tasks of them.",
            autocompletion=lambda incomplete: complete_list(incomplete, HARNESSES),
        ),
    ] = None,
    samples: Annotated[int, typer.Option(help="Number of samples for each harness task and length.")] = 50,
    base: Annotated[
        str | None, typer.Option(help="The base model of an adapter, if it is no longer where the adapter says.")
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="The unpatched model, to measure the loss of quality on short texts against.")
    ] = None,
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
    """Measure how long a text a checkpoint, adapter or hub model can use.

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
            help="Separated by commas, with options after a colon: none,linear,yarn:factor=4,beta_fast=16.",
            autocompletion=lambda incomplete: complete_list(incomplete, scheme_names()),
        ),
    ],
    target_length: Annotated[str, typer.Option(metavar="LENGTH", help="Length that the schemes extend to: 16k.")],
    text: Text = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="LENGTHS",
            help="Lengths to measure. Default: the trained length, twice that, ... up to the target.",
        ),
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
    """Patch one model with each scheme in turn, and rank the schemes with error bars.

    \b
    hf-posenc compare tiny --schemes ntk,yarn --target-length 1k --text book.txt
    hf-posenc compare MODEL --schemes none,yarn:beta_fast=16,self_extend --target-length 16k --text 'books/*.txt'
    """
    refuse_unknown_schemes(schemes)
    reached = parsed_lengths(lengths) if lengths else []
    asked = parse_request(locals(), reached, "perplexity", parsed_length(target_length))
    from .run_evaluation import run_compare

    run_compare(asked)
