"""How far a reader walks: the files that one call goes through, and how often it goes from one to another.

`python tools/walk.py` profiles `patch_model` and `load` on tiny models, warm, and counts functions of this package:
files visited, changes of file from one call to the next, calls. `--steps NAME` prints the walk itself.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import hf_posenc

PACKAGE = str(Path(hf_posenc.__file__).parent)
SIZES: dict[str, Any] = dict(
    vocab_size=97,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=32,
)
CELLS: dict[str, tuple[str, dict[str, Any]]] = {"llama": ("yarn", {"factor": 4.0}), "gpt2": ("alibi", {})}


@dataclass
class Walk:
    """The calls of one run, in their order, as (file, function)."""

    steps: list[tuple[str, str]] = field(default_factory=list)

    def notice(self, frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PACKAGE):
            self.steps.append((name.removeprefix(PACKAGE + "/"), frame.f_code.co_qualname))

    def counts(self) -> tuple[int, int, int]:
        """Files, changes of file, calls."""
        files = [file for file, _ in self.steps]
        changes = sum(one != other for one, other in pairwise(files))
        return len(set(files)), changes, len(files)


def walk(run: Callable[[], object]) -> Walk:
    walked = Walk()
    sys.setprofile(walked.notice)
    try:
        run()
    finally:
        sys.setprofile(None)
    return walked


def model_of(kind: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES)).eval()


def walks() -> dict[str, Walk]:
    """A patch and a load of each cell, the second of two."""
    return {name: found for kind in CELLS for name, found in _walks_of(kind).items()}


def _walks_of(kind: str) -> dict[str, Walk]:
    scheme, options = CELLS[kind]
    models = [model_of(kind) for _ in range(2)]
    patches = [walk(partial(hf_posenc.patch_model, model, scheme, **options)) for model in models]
    with tempfile.TemporaryDirectory() as folder:
        hf_posenc.save(models[0], folder)
        loads = [walk(partial(hf_posenc.load, folder)) for _ in range(2)]
    return {f"patch {kind} {scheme}": patches[-1], f"load {kind} {scheme}": loads[-1]}


def main() -> None:
    arguments = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    arguments.add_argument("--steps", metavar="NAME", help="print one walk, such as 'patch llama yarn'")
    asked = arguments.parse_args().steps
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    for name, walked in walks().items():
        if asked in (None, name):
            print("{:24} files {:3}  changes {:4}  calls {:5}".format(name, *walked.counts()))
        if asked == name:
            print(*(f"{file}: {function}" for file, function in walked.steps), sep="\n")


if __name__ == "__main__":
    main()
