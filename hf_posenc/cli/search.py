"""`hf-posenc search` and `hf-posenc recommend`: which positions are best for one's own model, length and text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..core.lengths import parsed_length
from ..errors import PosencError
from ..evaluation.measures.text_files import read_texts
from .names import check_name, scheme_names

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint: folder, hub name, or `tiny`.")]
Target = Annotated[str, typer.Option(metavar="LENGTH", help="Tokens to reach: 32k.")]
Text = Annotated[
    list[str] | None,
    typer.Option(metavar="FILE", help="A text file, a folder, or a pattern in quotes; more than once."),
]
FITNESSES = ("loss", "needles")
"""A test holds these against those of the search."""


def search(
    model: Model,
    target_length: Target,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the checkpoint, the log and a page are written.")],
    text: Text = None,
    scheme: Annotated[
        str, typer.Option(help="`longrope`: a factor for each pair; else a scheme's options.")
    ] = "longrope",
    temperature: Annotated[
        str | None, typer.Option(help="Of a scheme, with its numbers searched as well: drope, llama4, ministral.")
    ] = None,
    fitness: Annotated[str, typer.Option(help="What guides the search: loss, or needles.")] = "loss",
    short_weight: Annotated[float, typer.Option(help="How much the loss at the trained length counts.")] = 0.0,
    population: Annotated[int, typer.Option(help="New candidates in each round.")] = 16,
    parents: Annotated[int, typer.Option(help="That the next round is made of.")] = 6,
    rounds: Annotated[int, typer.Option(help="Of the search.")] = 8,
    samples: Annotated[int, typer.Option(help="Windows or needles that guide it.")] = 16,
    held_out: Annotated[int, typer.Option(help="Windows that judge what was found.")] = 24,
    seed: Annotated[int, typer.Option(help="The same seed finds the same.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, auto.")] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; the fastest, unless given.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint in FOLDER.")] = False,
) -> None:
    """Search for the positions that read a length best, on text that does not guide the search.

    The search is kept in FOLDER/search.jsonl as it goes, and goes on from there when it is run again.

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
    serve: Annotated[str | None, typer.Option(help="A runtime that must compute it right: vllm, llama.cpp.")] = None,
    no_train: Annotated[bool, typer.Option("--no-train", help="Only what works without training.")] = False,
    out: Annotated[str | None, typer.Option(metavar="FILE", help="JSONL that measurements are kept in.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, auto.")] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; the fastest, unless given.")] = None,
) -> None:
    """Say which scheme to take, with the evidence and the command to go on with.

    From rules at once; with --text the candidates that matter are measured on it.

    \b
    hf-posenc recommend tiny --target-length 1k
    hf-posenc recommend my-llama --target-length 32k --text books/ --serve vllm --no-train
    """
    target = parsed_length(target_length)
    texts = read_texts(text) if text else {}
    from .run_search import run_recommend

    run_recommend(model, target, texts, serve, not no_train, out, dtype, device)
