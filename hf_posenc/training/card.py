"""The model card of a run: base, settings, training and results."""

from __future__ import annotations

import platform
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..checkpoints.cards import front_matter, mark_card
from ..evaluation.measures.rows import Row
from ..evaluation.report.markdown import table
from ..evaluation.report.views import figure
from .settings import Settings

PACKAGES = ("hf-posenc", "torch", "transformers", "peft", "accelerate")
COMMANDS = ("accelerate", "torchrun", "hf-posenc")
MODULES = {
    "accelerate.commands.launch": ["accelerate", "launch"],
    "torch.distributed.run": ["torchrun"],
    "hf_posenc.training": ["hf-posenc", "train"],
    "hf_posenc": ["hf-posenc"],
}
"""The command that is the same as running a module with `python -m`."""
CONTROL = "unpatched, tuned"


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def command() -> str:
    """The command that was typed, including the launcher, which is found in the parent process."""
    import psutil  # type: ignore[import-untyped] # only this needs it

    try:
        process = psutil.Process()
        parent = process.parent()
        words, above = process.cmdline(), [] if parent is None else parent.cmdline()
    except psutil.Error:
        words, above = [sys.executable, *sys.argv], []
    told = next((command_as_typed(line) for line in (above, words) if command_as_typed(line)), None)
    return shlex.join(told or ["python", *words[1:]])


def command_as_typed(words: Sequence[str]) -> list[str] | None:
    """A command line without the path of its program; None if it does not start our training."""
    if not any(word.endswith("hf_posenc.training") or word == "train" for word in words):
        return None
    names = [Path(word).name for word in words]
    for at, name in enumerate(names[:3]):
        if name in COMMANDS:
            return [name, *words[at + 1 :]]
    for module, meant in MODULES.items():
        if module in words[:4]:
            return [*meant, *words[words.index(module) + 1 :]]
    return None


def results(rows: Sequence[Row]) -> str:
    """Tables of loss and passkeys by length, one line for each state of the model."""
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
    """The share of trials in which the first generated integer is the key, and the number of trials."""
    found = [r for r in rows if (r.task, r.protocol, r.scheme, r.length) == ("passkey", "generation", state, length)]
    trials = sum(r.n for r in found)
    return (sum(r.value * r.n for r in found) / trials, trials) if trials else None


def _passkeys(rows: Sequence[Row], state: str, length: int) -> str:
    found = passkeys(rows, state, length)
    return "-" if found is None else f"{found[0]:.0%} of {found[1]}"


def card(settings: Settings, rows: Sequence[Row], facts: dict[str, Any]) -> str:
    """The card of a run: Markdown with the metadata that the hub reads."""
    adapter = settings.tune.lora is not None
    lines = [
        "Load it with `hf_posenc.load(path)`, which patches the base model first and refuses one that does not fit."
        if adapter
        else "Load it with `hf_posenc.load(path)`, which gives it the positions that it was trained with.",
        "",
    ]
    head = _front_matter(settings, "peft" if adapter else "transformers")
    return mark_card(head, [*_run_facts(settings, facts), *lines, *_figures(settings, rows)])


def merged_card(settings: Settings, rows: Sequence[Row], facts: dict[str, Any]) -> str:
    """The card of the model with its adapter merged into it."""
    lines = [
        f"An adapter was merged into its base model: this is a whole model, in {settings.model.dtype}, and needs "
        "neither. Load it with `hf_posenc.load(path)`, which gives it the positions that it was trained with.",
        "",
    ]
    figures = _figures(settings, rows, "Figures are those of the adapter on its base, before it was merged. ")
    return mark_card(_front_matter(settings, "transformers"), [*_run_facts(settings, facts), *lines, *figures])


def _front_matter(settings: Settings, library: str) -> list[str]:
    names = [settings.scheme.name] if isinstance(settings.scheme.name, str) else []
    return front_matter(library, settings.model.path, ["hf-posenc", *names, "long-context"])


def _run_facts(settings: Settings, facts: dict[str, Any]) -> list[str]:
    base = settings.model.path or f"a fresh {(settings.model.config or {})['model_type']}"
    said = ", ".join(f"{key}={value}" for key, value in settings.scheme.options.items())
    written = ", ".join(f"{kind} in {dtype}" for kind, dtype in facts["written"].items())
    lines = [
        f"# {Path(settings.output).name}",
        "",
        f"- base: {base}",
        f"- positions: {settings.scheme.name or 'unpatched'}" + (f" ({said})" if said else ""),
        f"- rows of {', then '.join(map(str, settings.data.lengths))} tokens from {facts['data']}",
        f"- trained: {facts['trained']:,} parameters (the base has {facts['parameters']:,}), {facts['steps']} steps, "
        f"{facts['tokens']:,} tokens",
        f"- precision: computed in {precision(settings)}, trained in float32; written: {written}",
        f"- time: {facts['training_seconds']:.0f} s of training, {facts['seconds']:.0f} s with what was measured "
        f"before it, on {facts['processes']} process(es)",
        *(
            [f"- weights: those of step {facts['best_step']}, the best on rows that were held out"]
            if facts.get("best_step")
            else []
        ),
        *(f"- command: `{command}`" for command in facts["commands"]),
        f"- versions: {', '.join(f'{name} {number}' for name, number in facts['versions'].items())}",
        "",
    ]
    return lines


def precision(settings: Settings) -> str:
    """The precision that the model computes in."""
    if settings.model.dtype != "float32":
        return settings.model.dtype
    return "bfloat16 by autocast" if settings.train.bf16 else "float32"


def _figures(settings: Settings, rows: Sequence[Row], first: str = "") -> list[str]:
    lines = [
        f"{first}On text that was held out, ± standard error. Loss: nats, of the same tokens at every length.",
        "",
        results(rows),
        "",
    ]
    if any(row.scheme == CONTROL for row in rows) and settings.scheme.name is not None:
        lines += [
            f"The control, *{CONTROL}*, is the model with its own positions, tuned on the same rows: what it gained "
            "too was gained in the domain of the text, not in length.",
            "",
        ]
    if settings.data.passkey:
        share = f"{settings.data.passkey:.0%}"
        lines += [f"Passkeys are task-trained here: {share} of the rows hid a number and asked for it.", ""]
    return lines
