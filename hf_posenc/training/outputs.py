"""The end of a run: load what was saved, measure it, and write the card, the tables and the picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from rich.markdown import Markdown

from ..checkpoints.embedders import copy_embedder
from ..checkpoints.load import load
from ..checkpoints.merge import merge
from ..evaluation.measures.rows import Row
from ..evaluation.report import write
from ..models import model_path
from .card import card, merged_card, results
from .preparation import AUTO, four_bits
from .resume import console
from .settings import Settings


def tuned_label(settings: Settings) -> str:
    """The label of the trained model's results."""
    return f"{settings.scheme.name or 'unpatched'}, tuned"


def finish(
    settings: Settings,
    folder: Path,
    merged: bool,
    figures: list[Row],
    measure: Any,
    facts: dict[str, Any],
    device: Any,
) -> None:
    """Measure the saved model in `folder`, add its results to `figures`, and write all reports of the run."""
    output, dtype = Path(settings.output), getattr(torch, settings.model.dtype)
    if settings.model.path is not None and folder.name == "model":
        copy_embedder(Path(model_path(settings.model.path)), folder, settings.data.reach)
    kind = AUTO[settings.model.objective] if folder.name == "model" else None
    given: dict[str, Any] = {"dtype": dtype}  # the base may be saved in another dtype
    if settings.model.quantize is not None:
        given["quantization_config"] = four_bits(settings.model.quantize, dtype)
    reloaded = load(folder, model_class=kind, **given)
    figures += measure(reloaded.to(device), label=tuned_label(settings))
    about = {
        "title": f"{settings.model.path or 'a fresh model'} with {settings.scheme.name or 'its own positions'}",
        **{key: facts[key] for key in ("trained_length", "command", "versions")},
    }
    (output / "metrics.json").write_text(
        json.dumps({"facts": facts, "figures": [figure.to_dict() for figure in figures]}, indent=1)
    )
    for suffix in (".md", ".png"):
        write(figures, output / f"metrics{suffix}", about)
    (folder / "README.md").write_text(card(settings, figures, facts))
    if merged:
        merge(folder, output / "merged", overwrite=True, **given)
        (output / "merged" / "README.md").write_text(merged_card(settings, figures, facts))
    console.print(Markdown(results(figures)))
    console.print(f"Written to {output}: {', '.join(sorted(path.name for path in output.iterdir()))}.", soft_wrap=True)
