"""The command line: `hf-posenc`, also `python -m hf_posenc`.

Everything that needs torch or transformers is imported inside the commands, so that help, completion and typing
mistakes are answered at once.
"""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer

from ..core.lengths import parsed_length
from ..errors import PosencError
from ..version import __version__
from .bench import bench
from .catalogue import families, schemes
from .commands import ListCommand
from .evaluation import compare_command, eval_command
from .explore import explore
from .messages import plain_errors, with_plain_errors
from .names import EXISTING, PLANS, check_name, scheme_names
from .search import recommend, search
from .serve_args import serve_args
from .serving import doctor, export, verify
from .training import ANY_WORDS, show_recipes, train

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,  # Rich's panels would cut names and paths at the terminal's width
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
LENGTHS = ("target_length", "trained_length")


def show_version(wanted: bool) -> None:
    if wanted:
        print(f"hf-posenc {__version__}")
        for package in ("torch", "transformers"):
            try:
                print(f"{package} {version(package)}")
            except PackageNotFoundError:
                print(f"{package} is not installed")
        raise typer.Exit


@app.callback()
def main(
    _version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show versions and exit.")
    ] = False,
) -> None:
    """Swap the position encoding of a Hugging Face model, and measure the result.

    \b
    hf-posenc schemes                                     list all schemes
    hf-posenc describe tiny                               show the positions of a checkpoint
    hf-posenc patch SRC DST --scheme yarn --target-length 32k
    hf-posenc compare tiny --schemes ntk,yarn --target-length 1k --text book.txt

    A model is a folder, a hub name, or `tiny`, the small LLaMA inside this package.
    """


def parse_options(given: list[str]) -> dict[str, Any]:
    """Options from `name=value` pairs: lengths such as 32k, other values as JSON, or else as text."""
    options: dict[str, Any] = {}
    for item in given:
        name, equals, value = item.partition("=")
        if not equals:
            raise PosencError(f"--option takes name=value, got {item!r}.")
        if name in LENGTHS:
            options[name] = parsed_length(value)
            continue
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            options[name] = value
    return options


def patch(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Folder of a checkpoint, or `tiny`.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="Folder to write.")],
    scheme: Annotated[
        str | None,
        typer.Option(
            help="One of `hf-posenc schemes`.",
            autocompletion=lambda incomplete: [n for n in scheme_names() if n.startswith(incomplete)],
        ),
    ] = None,
    plan: Annotated[
        str | None,
        typer.Option(help="Instead of --scheme: one for each group of layers, 'every 4th: none; rest: yarn' or swan."),
    ] = None,
    target_length: Annotated[str | None, typer.Option(help="Length to extend to, in tokens: 32768 or 32k.")] = None,
    factor: Annotated[
        float | None, typer.Option(help="Length to extend to, as a multiple of the trained length.")
    ] = None,
    trained_length: Annotated[
        str | None, typer.Option(help="The trained length, if the config states it wrongly.")
    ] = None,
    existing: Annotated[
        str | None, typer.Option(help="What to do with a RoPE that is scaled already: extend or replace.")
    ] = None,
    temperature: Annotated[
        str | None, typer.Option(help="Attention temperature, which scales queries: log, ssmax, 'drope c=0.2' ...")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="An option of the scheme, as name=value; may be repeated.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint in TARGET.")] = False,
) -> None:
    """Write a patched copy of a checkpoint, without loading the model.

    \b
    hf-posenc patch my-llama my-long-llama --scheme yarn --target-length 32k
    hf-posenc patch my-llama my-long-llama --scheme yarn --factor 4 --option beta_fast=16
    hf-posenc patch my-llama my-swan --plan 'every 4th: none temperature=log; rest: window window=4096'
    """
    if (scheme is None) == (plan is None):
        raise PosencError("Give either --scheme, or --plan (which names a scheme for each group of layers).")
    if scheme is not None:
        check_name("scheme", scheme, scheme_names())
    elif ":" not in str(plan):
        check_name("plan", str(plan), PLANS)
    if existing is not None:
        check_name("way with an existing scaling", existing, EXISTING)
    lengths = {
        "target_length": None if target_length is None else parsed_length(target_length),
        "factor": factor,
        "trained_length": None if trained_length is None else parsed_length(trained_length),
    }
    options = {**lengths, "temperature": temperature, **parse_options(option or [])}
    from ..checkpoints.on_disk import patch_checkpoint

    print(patch_checkpoint(source, target, scheme or str(plan), existing=existing, overwrite=overwrite, **options))
    print(f"\n{target} is written.")


def describe(
    path: Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint or adapter: folder, hub name, `tiny`.")],
) -> None:
    """Show how a checkpoint or adapter encodes positions, without loading its weights.

    \b
    hf-posenc describe tiny
    hf-posenc describe my-adapter
    """
    from ..checkpoints.on_disk import describe_checkpoint

    description, adapter = describe_checkpoint(path)
    if adapter is not None:
        kind, base = adapter.get("peft_type"), adapter.get("base_model_name_or_path")
        print(f"{'adapter':<22}{kind} on {base}")
    print(description)


def merge(
    adapter: Annotated[str, typer.Argument(metavar="ADAPTER", help="Folder of a PEFT adapter on a patched model.")],
    out: Annotated[str, typer.Argument(metavar="TARGET", help="Folder to write.")],
    base: Annotated[
        str | None, typer.Option(help="The base model, if it is no longer where the adapter says.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint in TARGET.")] = False,
) -> None:
    """Write an adapter and its base model as one self-contained checkpoint.

    \b
    hf-posenc merge runs/tiny_yarn/adapter my-long-llama
    """
    from ..checkpoints.merge import merge as merge_adapter
    from ..checkpoints.on_disk import describe_checkpoint

    merge_adapter(adapter, out, base=base, overwrite=overwrite)
    print(describe_checkpoint(out)[0])
    print(f"\n{out} is written.")


def reseal(
    path: Annotated[str, typer.Argument(metavar="PATH", help="Folder of a checkpoint that an earlier version wrote.")],
) -> None:
    """Seal a checkpoint of an earlier version, so that runtimes without hf_posenc refuse it instead of misreading it.

    \b
    hf-posenc reseal my-old-adapter
    """
    from ..checkpoints.reseal import reseal as reseal_checkpoint

    done = reseal_checkpoint(path)
    print(
        f"{path} is sealed now."
        if done
        else f"{path} is left as it is: it is sealed already, or other runtimes load it correctly."
    )


for _command, _short in (
    (schemes, "List every scheme and where it works."),
    (families, "List the families of models."),
    (patch, "Write a patched copy of a checkpoint."),
    (describe, "Show how a checkpoint encodes positions."),
    (explore, "Write a page to try schemes with sliders."),
    (merge, "Merge an adapter into its base model."),
    (reseal, "Seal a checkpoint of an earlier version."),
    (export, "Write a checkpoint for another runtime."),
    (doctor, "Find problems with positions."),
    (verify, "Check that a runtime computes the same."),
):
    app.command(short_help=_short)(with_plain_errors(_command))
app.command("serve-args", short_help="Print how to serve a checkpoint.")(with_plain_errors(serve_args))
app.command("eval", cls=ListCommand, short_help="Measure how long a text a model can use.")(
    with_plain_errors(eval_command)
)
app.command("compare", cls=ListCommand, short_help="Rank schemes on one model.")(with_plain_errors(compare_command))


app.command("search", short_help="Find the best factors or options for a model.")(with_plain_errors(search))
app.command("recommend", short_help="Recommend a scheme.")(with_plain_errors(recommend))
app.command("train", context_settings=ANY_WORDS, short_help="Fine-tune a model by a recipe.")(train)
app.add_typer(bench, name="bench")
app.command("recipes", short_help="List the recipes of this package.")(with_plain_errors(show_recipes))


@app.command(
    "lm-eval",
    short_help="Run lm-evaluation-harness's own command line.",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def lm_eval(context: typer.Context) -> None:
    """lm-evaluation-harness's own command line, with `--model hf-posenc`."""
    with plain_errors():
        from ..evaluation.suites.lm_eval_command import run_lm_eval  # an extra, and slow to import

        run_lm_eval(context.args)
