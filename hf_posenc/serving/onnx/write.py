"""The graph of a live model as a file."""

from __future__ import annotations

import logging
import re
import warnings
from pathlib import Path
from typing import Any

import torch

from ...errors import UnsupportedCell
from ...extras import require
from ...patching.describe import describe
from ...patching.grades import SEALED
from ...patching.patch_state import record_of
from ...schemes import SCHEMES
from ..rotation import follows_length
from .graphs import FILE, cached_graph, whole_graph

COLOURS = re.compile(r"\x1b\[[0-9;]*m")
"""torch's exporter writes for a terminal."""


def write_onnx(model: Any, folder: Path) -> None:
    """The graph of a live model, in fp32, into a folder."""
    require("onnx", "onnx", "An ONNX graph")
    require("onnxscript", "onnx", "An ONNX graph")
    refuse_moving(model)
    graph = cached_graph(model) if has_cache(model) else whole_graph(model)
    level = logging.getLogger("torch.onnx").level
    try:
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            program: Any = torch.onnx.export(
                graph.module,
                graph.arguments,
                input_names=graph.inputs,
                output_names=graph.outputs,
                dynamic_shapes=graph.shapes,
                dynamo=True,
                verbose=False,
            )
        program.save(str(folder / FILE))
    except Exception as error:  # what cannot be traced fails in as many ways as there are models
        kind, scheme = type(model).__name__, describe(model).scheme
        raise UnsupportedCell(f"torch cannot export {scheme!r} on {kind} for any length: {_reason(error)}") from error
    finally:
        logging.getLogger("torch.onnx").setLevel(level)


def _reason(error: BaseException) -> str:
    """What failed first; the errors that are raised from it say only in which step that was."""
    while error.__cause__ is not None:
        error = error.__cause__
    said = COLOURS.sub("", str(error)).strip()
    return said.splitlines()[0] if said else type(error).__name__


def has_cache(model: Any) -> bool:
    """Whether a graph can be given keys and values of earlier calls: of a decoder whose attention is its own."""
    decodes = getattr(model, "can_generate", lambda: False)() and not model.config.is_encoder_decoder
    return bool(decodes) and not describe(model).portability.startswith(SEALED)


def refuse_moving(model: Any) -> None:
    """Raise for a rotation that looks at the length in each call: a graph is traced once."""
    if follows_length(model):
        record = record_of(model)
        assert record is not None
        known = SCHEMES.registered().get(record.scheme.name)  # a plan is none
        nearest = (known and known.nearest) or "ntk"
        raise UnsupportedCell(
            f"{record.scheme.name!r} chooses its angles by the length of each text, which a graph that is traced once "
            f"cannot do. The nearest scheme that can be exported is {nearest!r}."
        )
