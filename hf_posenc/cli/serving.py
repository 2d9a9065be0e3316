"""Commands for other runtimes: `hf-posenc export`, `verify`, `doctor`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..core.lengths import parsed_length
from ..errors import PosencError
from .names import VERIFIERS, check_name

FORMATS = {
    "gguf": "llama.cpp",
    "vllm": "vllm",
    "sglang": "sglang",
    "mlx": "mlx",
    "ct2": "ct2",
    "onnx": "onnx",
}
"""Each format, and the runtime that reads it."""
DTYPES = ("f32", "f16", "bf16", "q8_0", "q8_0-f16")


def export(
    source: Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint: folder, or `tiny`.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="What to write: FILE.gguf, or a folder.")],
    to: Annotated[str, typer.Option(help=f"The format: {', '.join(FORMATS)}.")] = "gguf",
    dtype: Annotated[str, typer.Option(help=f"How a GGUF file stores weights: {', '.join(DTYPES)}.")] = "f16",
    fix: Annotated[
        str | None,
        typer.Option(help="Instead of converting MODEL: correct this GGUF file, which was converted from it."),
    ] = None,
) -> None:
    """Write a checkpoint for another runtime with its true positions, and check the result in that runtime.

    A scheme that the runtime cannot compute is refused, and the nearest one that it can is named. If a runtime is
    installed in another environment, name its interpreter in HF_POSENC_VLLM_PYTHON, HF_POSENC_MLX_PYTHON or
    HF_POSENC_CT2_PYTHON.

    \b
    hf-posenc export my-long-llama my-long-llama.gguf --dtype q8_0
    hf-posenc export my-long-llama my-long-llama-fixed.gguf --fix my-long-llama-converted.gguf
    hf-posenc export my-long-llama my-long-llama-vllm --to vllm
    """
    check_name("format", to, list(FORMATS))
    check_name("dtype", dtype, DTYPES)
    if fix is not None and to != "gguf":
        raise PosencError(f"--fix corrects a GGUF file, and --to {to} was asked for.")
    if not Path(target).absolute().parent.is_dir():
        raise PosencError(f"{target} cannot be written: there is no directory {Path(target).parent}. Make it first.")
    from ..serving.exports import export_checkpoint, proof_advice

    proof = export_checkpoint(source, target, to, dtype, fix)
    print(f"{target} is written.")
    print(proof if proof is not None else proof_advice(FORMATS[to], target, source))


def verify(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint, an adapter, or a GGUF file.")],
    runtime: Annotated[str, typer.Option("--with", help=f"The runtime: {', '.join(VERIFIERS)}.")],
    against: Annotated[str | None, typer.Option(help="The checkpoint that the file was made from.")] = None,
    lengths: Annotated[
        str | None, typer.Option(help="Lengths to compare at: 256,1k. Default: the trained and the target length.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File for the figures. Default: beside the checkpoint.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run a checkpoint in a runtime, and compare its predictions with those of the loaded model.

    Exit codes: 0 if both compute the same, 1 if they differ or the checkpoint is damaged, 2 if there is nothing to
    compare, 3 if the runtime is not installed, 4 if the runtime refuses the checkpoint.

    \b
    hf-posenc verify my-long-llama --with transformers
    hf-posenc verify my-long-llama.gguf --with llama.cpp --against my-long-llama
    """
    check_name("runtime", runtime, VERIFIERS)
    asked = [parsed_length(one) for one in lengths.split(",")] if lengths else None
    from ..serving.verify import proof_file
    from ..serving.verify import verify as verify_checkpoint

    found = verify_checkpoint(path, runtime, against=against, lengths=asked)
    print(json.dumps(found.to_dict(), indent=2) if as_json else found.text)
    if found.proof is not None:
        found.write(out or proof_file(path, runtime))
    raise typer.Exit(found.code)


def doctor(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint, adapter, GGUF file or serving config.")],
    against: Annotated[str | None, typer.Option(help="The checkpoint that a GGUF file was made from.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a checkpoint, adapter, GGUF file or serving config does with positions, and find problems.

    A serving config is JSON, flat YAML, a Modelfile, or a file with a command, which is not run. Exit codes: 0 if
    nothing is suspicious, 1 if something is, 2 if PATH cannot be read.

    \b
    hf-posenc doctor my-long-llama
    hf-posenc doctor my-long-llama.gguf --against my-long-llama
    hf-posenc doctor serve.sh --json
    """
    from ..serving.doctor.examine import doctor as examine

    found = examine(path, against)
    print(json.dumps(found.to_dict(), indent=2) if as_json else found)
    raise typer.Exit(found.code)
