"""The model card of a run: what was made, of what, how, and how it fares."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..evaluation.measures.rows import Row
from ..evaluation.report.markdown import table
from ..evaluation.report.views import figure
from .settings import Settings

PACKAGES = ("hf-posenc", "torch", "transformers", "peft", "accelerate")


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def command() -> str:
    """What was typed, as far as a process can know it."""
    launched = any(name.startswith("ACCELERATE_") for name in os.environ) or "TORCHELASTIC_RUN_ID" in os.environ
    return " ".join(["accelerate launch" if launched else "python", *sys.argv])


def results(rows: Sequence[Row]) -> str:
    """Loss and passkeys by length, one line for each state of the model."""
    lengths = sorted({row.length for row in rows})
    states = list(dict.fromkeys(row.scheme for row in rows))
    figures: dict[str, Callable[[Sequence[Row], str, int], str]] = {
        "loss": _loss,
        "passkeys found": _passkeys,
        "embed_passkey, accuracy@1": partial(_accuracy, "embed_passkey"),
        "embed_needle, accuracy@1": partial(_accuracy, "embed_needle"),
    }
    parts = []
    for name, figure_of in figures.items():
        lines = [[state, *(figure_of(rows, state, length) for length in lengths)] for state in states]
        if any(cell != "-" for line in lines for cell in line[1:]):
            parts.append(table([name, *map(str, lengths)], lines))
    return "\n\n".join(part.strip() for part in parts)


def _loss(rows: Sequence[Row], state: str, length: int) -> str:
    found = [r for r in rows if r.metric == "loss" and (r.scheme, r.length) == (state, length)]
    return figure(found[0].value) + (f" ± {figure(found[0].stderr)}" if found[0].stderr else "") if found else "-"


def _accuracy(task: str, rows: Sequence[Row], state: str, length: int) -> str:
    found = [r for r in rows if (r.task, r.scheme, r.length) == (task, state, length)]
    return f"{found[0].value:.2f} ± {found[0].stderr or 0:.2f}" if found else "-"


def passkeys(rows: Sequence[Row], state: str, length: int) -> tuple[float, int] | None:
    """The share of trials in which the first integer that was written is the key, and how many there were."""
    found = [r for r in rows if (r.task, r.protocol, r.scheme, r.length) == ("passkey", "generation", state, length)]
    trials = sum(r.n for r in found)
    return (sum(r.value * r.n for r in found) / trials, trials) if trials else None


def _passkeys(rows: Sequence[Row], state: str, length: int) -> str:
    found = passkeys(rows, state, length)
    return "-" if found is None else f"{found[0]:.0%} of {found[1]}"


def card(settings: Settings, rows: Sequence[Row], facts: dict[str, Any]) -> str:
    """Markdown with the metadata that the hub reads."""
    base = settings.model.path or f"a fresh {(settings.model.config or {})['model_type']}"
    tuned = settings.tune.lora is not None and not settings.tune.whole
    head = ["---", "library_name: " + ("peft" if tuned else "transformers")]
    if settings.model.path is not None:
        head.append(f"base_model: {settings.model.path}")
    head += ["tags:", "- hf-posenc", "- long-context", "---", ""]
    scheme = settings.scheme.name or "unpatched"
    said = ", ".join(f"{key}={value}" for key, value in settings.scheme.options.items())
    lines = [
        f"# {Path(settings.output).name}",
        "",
        f"- base: {base}",
        f"- positions: {scheme}" + (f" ({said})" if said else ""),
        f"- rows of {', then '.join(map(str, settings.data.lengths))} tokens from {facts['data']}",
        f"- trained: {facts['trained']:,} of {facts['parameters']:,} parameters, {facts['steps']} steps of "
        f"{facts['tokens_a_step']:,} tokens, in {facts['seconds']:.0f} s on {facts['processes']} process(es)",
        f"- command: `{facts['command']}`",
        f"- versions: {', '.join(f'{name} {number}' for name, number in facts['versions'].items())}",
        "",
        "Load it with `hf_posenc.load(path)`, which patches the base model first and refuses one that does not fit.",
        "",
        "On text that was held out, ± standard error. Loss: nats, of the same tokens at every length.",
        "",
        results(rows),
        "",
    ]
    if settings.data.passkey:
        share = f"{settings.data.passkey:.0%}"
        lines += [f"Passkeys are task-trained here: {share} of the rows hid a number and asked for it.", ""]
    return "\n".join([*head, *lines])
