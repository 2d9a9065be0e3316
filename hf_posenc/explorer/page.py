"""The explorer as one self-contained HTML file."""

from __future__ import annotations

from html import escape
from importlib import resources
from string import Template
from typing import Any

from ..checkpoints.on_disk import config_of, model_of_config
from ..models import model_path
from ..version import __version__
from .controls import CONTROLS
from .data import as_script, explorer_data

SIZES = {"hidden_size": "hidden size", "num_heads": "heads", "rotary_dim": "rotated channels a head"}


def explorer_of(path: str) -> str:
    """The page of a checkpoint: a folder, a hub name, or `tiny`. Only its config is read."""
    return explorer_page(model_of_config(config_of(model_path(path))), path)


def explorer_page(model: Any, path: str) -> str:
    """The page of a live model; `path` names it in commands."""
    data = explorer_data(model, path)
    files = resources.files(__package__)
    template, formulas, view = (
        files.joinpath(name).read_text(encoding="utf-8") for name in ("page.html", "formulas.js", "view.js")
    )
    geometry = next(entry["geometry"] for entry in data["schemes"].values() if "geometry" in entry)
    sizes = ", ".join(f"{name} {geometry[key]:,}" for key, name in SIZES.items())
    return Template(template).substitute(
        name=escape(path),
        about=escape(
            f"{data['model']}, trained at {geometry['trained_length']:,} tokens; {sizes}. "
            f"Its own positions: {data['own']}."
        ),
        footer=escape(
            f"Made by hf-posenc {__version__}, from the config alone; {len(CONTROLS)} schemes. Predicted reach looks "
            "at positions and at nothing else: measure with hf-posenc eval. This file fetches nothing."
        ),
        data=as_script(data),
        formulas=formulas,
        view=view,
    )
