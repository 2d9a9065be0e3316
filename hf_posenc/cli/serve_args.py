"""`hf-posenc serve-args`: the command that serves a checkpoint."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from .names import SERVERS, check_name


def serve_args(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint, or a GGUF file.")],
    runtime: Annotated[str, typer.Option("--for", help="vllm, sglang, llama.cpp, ollama, tgi or trl.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: commands, and settings for a config.")] = False,
) -> None:
    """Print the exact command that serves a checkpoint in a runtime, and the evidence that it is right.

    If it cannot be served there, print the reason and the nearest scheme that can, with exit code 2.

    \b
    hf-posenc serve-args my-long-llama --for vllm
    """
    check_name("runtime", runtime, SERVERS)
    from ..serving.arguments import serve_args as arguments

    found = arguments(path, runtime)
    print(json.dumps(found.to_dict(), indent=2) if as_json else found)
