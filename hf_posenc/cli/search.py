"""`hf-posenc search` and `hf-posenc recommend`: the best scheme for a model, a length and a text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..core.lengths import parsed_length
from ..errors import PosencError
from ..evaluation.measures.text_files import read_texts
from .names import check_name, scheme_names

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint: folder, hub name, or `tiny`.")]
Target = Annotated[str, typer.Option(metavar="LENGTH", help="Length to extend to, in tokens: 32k.")]
Text = Annotated[
    list[str] | None,
    typer.Option(metavar="FILE", help="A text file, a folder, or a quoted pattern; may be repeated."),
]
FITNESSES = ("loss", "needles")
"""A test compares these with those of the search."""


def search(
    model: Model,
    target_length: Target,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder for the checkpoint, the log and a page.")],
    text: Text = None,
    scheme: Annotated[
        str, typer.Option(help="`longrope` searches a factor for each pair; any other scheme its options.")
    ] = "longrope",
    temperature: Annotated[
        str | None,
        typer.Option(help="Temperature of the scheme, whose numbers are searched too: drope, llama4, ministral."),
    ] = None,
    fitness: Annotated[str, typer.Option(help="What guides the search: loss, or needles.")] = "loss",
    short_weight: Annotated[float, typer.Option(help="Weight of the loss at the trained length.")] = 0.0,
    population: Annotated[int, typer.Option(help="New candidates in each round.")] = 16,
    parents: Annotated[int, typer.Option(help="Best candidates that the next round is made from.")] = 6,
    rounds: Annotated[int, typer.Option(help="Number of rounds.")] = 8,
    samples: Annotated[int, typer.Option(help="Windows or needles that guide the search.")] = 16,
    held_out: Annotated[int, typer.Option(help="Windows that the result is judged on.")] = 24,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, auto.")] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ... Default: the fastest one.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint in FOLDER.")] = False,
) -> None:
    """Search for the factors or options with the lowest loss at a length, and judge them on text held out.

    Progress is saved in FOLDER/search.jsonl; the same command resumes the search.

    \b
    hf-posenc search my-llama --target-length 32k --text books/ --out my-long-llama
    hf-posenc search tiny --target-length 1k --text book.txt --out long-tiny --scheme yarn
    accelerate launch -m hf_posenc search my-llama --target-length 32k --text books/ --out my-long-llama
    """
    check_name("scheme", scheme, scheme_names())
    check_name("fitness", fitness, FITNESSES)
    target = parsed_length(target_length)
    if not text:
        raise PosencError("A search reads text, and none was given: name files, folders or patterns with --text.")
    if (out / "config.json").exists() and not overwrite:
        raise PosencError(f"{out} holds a checkpoint already. Name another folder, or say --overwrite.")
    texts = read_texts(text)
    from .run_search import run_search

    sizes = {
        "population": population, "parents": parents, "rounds": rounds, "samples": samples, "held_out": held_out
    }  # fmt: skip
    run_search(model, target, out, texts, scheme, temperature, fitness, short_weight, sizes, seed, dtype, device)


def recommend(
    model: Model,
    target_length: Target,
    text: Text = None,
    serve: Annotated[
        str | None, typer.Option(help="Only schemes that this runtime computes correctly: vllm, llama.cpp.")
    ] = None,
    no_train: Annotated[bool, typer.Option("--no-train", help="Only schemes that work without training.")] = False,
    out: Annotated[str | None, typer.Option(metavar="FILE", help="Keep measurements in this JSONL file.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, auto.")] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ... Default: the fastest one.")] = None,
) -> None:
    """Recommend a scheme, with the evidence and the command to patch with it.

    Without --text the answer follows from rules; with it the best candidates are measured.

    \b
    hf-posenc recommend tiny --target-length 1k
    hf-posenc recommend my-llama --target-length 32k --text books/ --serve vllm --no-train
    """
    target = parsed_length(target_length)
    texts = read_texts(text) if text else {}
    from .run_search import run_recommend

    run_recommend(model, target, texts, serve, not no_train, out, dtype, device)
