"""The command that takes checkpoints to other runtimes: `hf-posenc export`."""

from __future__ import annotations

from typing import Annotated

import typer

from .known import check

RUNTIMES = ("gguf",)
DTYPES = ("f32", "f16", "bf16", "q8_0")


def export(
    source: Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint: folder, or `tiny`.")],
    target: Annotated[str, typer.Argument(metavar="FILE", help="The file to write, FILE.gguf.")],
    to: Annotated[str, typer.Option(help="The format: gguf, for llama.cpp.")] = "gguf",
    dtype: Annotated[str, typer.Option(help="Of the weights: f32, f16, bf16 or q8_0.")] = "f16",
) -> None:
    """Write a checkpoint for another runtime, with the positions that it really has, and prove it there.

    What the runtime cannot compute is refused, with the nearest scheme that it can.

    \b
    hf-posenc export my-long-llama my-long-llama.gguf --dtype q8_0
    """
    check("format", to, RUNTIMES)
    check("dtype", dtype, DTYPES)
    from ..serving.gguf.export import export_gguf

    proof = export_gguf(source, target, dtype)
    print(f"{target} is written.")
    if proof is None:
        print("Not proved here: llama.cpp is not installed. To prove it: pip install xllamacpp, then export again.")
    else:
        print(proof)
