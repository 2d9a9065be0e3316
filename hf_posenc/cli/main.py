"""The command line: `hf-posenc`, also `python -m hf_posenc`."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..checkpoints.on_disk import describe_checkpoint, patch_checkpoint
from ..checkpoints.reseal import reseal as reseal_checkpoint
from ..checkpoints.save_load import merge as merge_adapter
from ..errors import PosencError
from ..families import FAMILIES, IMAGE_FAMILIES
from ..families.verified import summary
from ..families.verified import verified as found_families
from ..patching.describe import Description
from ..patching.grades import KINDS, MEANING, cells, serving_advice
from ..patching.image_checks import ImageDescription
from ..schemes import SCHEMES
from .evaluation import COMMANDS

app = typer.Typer(
    help="Swap how a Hugging Face model knows positions, and back.", no_args_is_help=True, add_completion=False
)


@contextmanager
def plain_errors() -> Iterator[None]:
    """A user's mistake is answered with its message alone."""
    try:
        yield
    except (PosencError, OSError) as error:
        print(f"hf-posenc: {error}", file=sys.stderr)
        raise typer.Exit(2) from None


@app.callback()
def main() -> None:
    """Swap how a Hugging Face model knows positions, and back."""


@app.command()
def schemes() -> None:
    """Every scheme, on models with RoPE, with a table and so on, and who can load the result."""
    grades = cells()
    table = Table("scheme", *(f"on {kind}" for kind in KINDS), "what it does", box=None)
    for name, scheme in SCHEMES.items():
        table.add_row(name, *(grades[name, kind].partition(":")[0] for kind in KINDS), scheme.summary)
    console = Console()
    console.print(table)
    console.print()
    for grade, meaning in MEANING.items():
        console.print(f"{grade}: {meaning}")
    for (name, kind), grade in grades.items():
        word, _, reason = grade.partition(": ")
        if reason:
            console.print(f"{word}: {name} on {kind}: {reason}")


@app.command()
def families(
    verified: Annotated[
        bool, typer.Option("--verified", help="every model type that was tried, and how it went")
    ] = False,
) -> None:
    """Every family and the model types that it serves."""
    if verified:
        return show_verified()
    table = Table("family", "own positions", "model types", box=None)
    for family in FAMILIES.values():
        table.add_row(
            family.name, family.positions, ", ".join(family.model_types) or "every other that follows the conventions"
        )
    for images in IMAGE_FAMILIES.values():
        table.add_row(images.name, f"{images.positions}, of images", ", ".join((*images.model_types, *images.wholes)))
    Console().print(table)


def show_verified() -> None:
    found = found_families()
    table = Table("model type", "verdict", "schemes", "why not", box=None, padding=(0, 2, 0, 0))
    counts: Counter[str] = Counter()
    for name, verdicts in found["families"].items():
        word, done, reason = summary(verdicts)
        counts[word] += 1
        table.add_row(name, word, done, reason)
    console = Console()
    console.print(table)
    about = ", ".join(f"{name} {version}" for name, version in found["about"].items())
    console.print(f"{sum(counts.values())} model types: " + ", ".join(f"{n} {word}" for word, n in counts.items()))
    console.print(f"Tried on tiny random models with {about}.")


def parsed_options(given: list[str]) -> dict[str, Any]:
    """`name=value` pairs; values are read as JSON, or else as text."""
    options = {}
    for item in given:
        name, equals, value = item.partition("=")
        if not equals:
            raise PosencError(f"--option takes name=value, got {item!r}.")
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            options[name] = value
    return options


def show(description: Description | ImageDescription) -> None:
    print(description)
    if isinstance(description, Description):  # of those that serve images nothing is known
        print(f"{'other runtimes':<22}{serving_advice(description.scheme, description.portability)}")


@app.command()
def patch(
    source: Annotated[str, typer.Argument(help="directory of a checkpoint")],
    target: Annotated[str, typer.Argument(help="directory to write")],
    scheme: Annotated[str, typer.Option(help="see `hf-posenc schemes`")],
    target_length: Annotated[int | None, typer.Option(help="tokens to reach")] = None,
    factor: Annotated[float | None, typer.Option(help="or how many times the trained length")] = None,
    trained_length: Annotated[int | None, typer.Option(help="if the config is wrong about it")] = None,
    existing: Annotated[str | None, typer.Option(help="a scaled RoPE: extend or replace it")] = None,
    option: Annotated[list[str] | None, typer.Option(help="name=value of the scheme, more than once")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace a checkpoint in TARGET")] = False,
) -> None:
    """Write a patched copy of a checkpoint, without loading the model."""
    with plain_errors():
        lengths = {"target_length": target_length, "factor": factor, "trained_length": trained_length}
        options = {**lengths, **parsed_options(option or [])}
        show(patch_checkpoint(source, target, scheme, existing=existing, overwrite=overwrite, **options))


@app.command()
def describe(path: Annotated[str, typer.Argument(help="a checkpoint or adapter: directory or hub name")]) -> None:
    """Tell what a checkpoint or adapter would do, without loading its weights."""
    with plain_errors():
        description, adapter = describe_checkpoint(path)
        if adapter is not None:
            kind, base = adapter.get("peft_type"), adapter.get("base_model_name_or_path")
            print(f"{'adapter':<22}{kind} on {base}")
        show(description)


@app.command()
def merge(
    adapter: Annotated[str, typer.Argument(help="directory of a PEFT adapter on a patched model")],
    out: Annotated[str, typer.Argument(help="directory to write")],
    base: Annotated[str | None, typer.Option(help="the base model, if it has moved")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace a checkpoint in OUT")] = False,
) -> None:
    """Write an adapter and its base model as one self-contained checkpoint."""
    with plain_errors():
        merge_adapter(adapter, out, base=base, overwrite=overwrite)
        show(describe_checkpoint(out)[0])


@app.command()
def reseal(
    path: Annotated[str, typer.Argument(help="directory of a checkpoint that an earlier version wrote")],
) -> None:
    """Let every runtime but this one refuse a sealed checkpoint, also if an earlier version wrote it."""
    with plain_errors():
        done = reseal_checkpoint(path)
        print(f"{path} is sealed now." if done else f"{path} needs nothing: it is sealed, or others load it right.")


def answering(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose errors are answered plainly."""

    @wraps(command)
    def run(**given: Any) -> None:
        with plain_errors():
            command(**given)

    return run


for _name, _command in COMMANDS.items():
    app.command(_name)(answering(_command))


@app.command(
    "lm-eval", context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def lm_eval(context: typer.Context) -> None:
    """lm-evaluation-harness's own command line, with `--model hf-posenc`."""
    from ..evaluation.suites.lm_eval_command import run_lm_eval  # an extra, and slow to import

    with plain_errors():
        run_lm_eval(context.args)
