"""ONNX graphs in onnxruntime. A graph with a cache reads prompts in two parts, to check the cache too.

A checkpoint's folder without a graph is exported to a temporary one.
"""

from __future__ import annotations

import importlib.metadata
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import PosencError
from .onnx.graphs import FILE
from .readers import Prompts, Reader, Subject

PAST, PRESENT = "past_key_values.", "present."


def version() -> str | None:
    try:
        return f"onnxruntime {importlib.metadata.version('onnxruntime')}"
    except importlib.metadata.PackageNotFoundError:
        return None


def read(subject: Subject, prompts: Prompts) -> list[Tensor]:
    file = subject.path / FILE if subject.path.is_dir() else subject.path
    if file.is_file():
        return read_graph(file, prompts)
    from .onnx.write import write_onnx  # needs an extra

    with tempfile.TemporaryDirectory() as folder:
        write_onnx(subject.model, Path(folder))
        return read_graph(Path(folder) / FILE, prompts)


def read_graph(file: Path, prompts: Prompts) -> list[Tensor]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = int(os.environ.get("OMP_NUM_THREADS", 0))
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        return [_last(session, list(prompt)) for prompt in prompts]
    except PosencError:
        raise
    except Exception as error:  # its errors have no class in common
        raise PosencError(f"onnxruntime refuses {file.name}: {error}") from error


def _last(session: Any, prompt: list[int]) -> Tensor:
    """Log-probabilities of the token after a prompt."""
    inputs = {given.name: given.shape for given in session.get_inputs()}
    half = len(prompt) // 2 if any(name.startswith(PAST) for name in inputs) else 0
    past: dict[str, Any] = {
        name: torch.zeros(1, shape[1], 0, shape[3]).numpy() for name, shape in inputs.items() if name.startswith(PAST)
    }
    row = None
    for start, end in ((0, half), (half, len(prompt))) if half else ((0, len(prompt)),):
        feed: dict[str, Any] = {"input_ids": torch.tensor([prompt[start:end]]).numpy(), **past}
        if "attention_mask" in inputs:
            feed["attention_mask"] = torch.ones(1, end, dtype=torch.long).numpy()
        if "position_ids" in inputs:
            feed["position_ids"] = torch.arange(start, end)[None].numpy()
        outputs = dict(zip([out.name for out in session.get_outputs()], session.run(None, feed), strict=True))
        past = {name: outputs[PRESENT + name.removeprefix(PAST)] for name in past}
        row = torch.from_numpy(outputs["logits"][0, -1]).float().log_softmax(-1)
    assert row is not None
    return row


READER = Reader(version, "pip install onnxruntime", read)
