"""How does the model inside this package do past its trained length, with schemes, and after a minute of LoRA?

    python -m hf_posenc.training.demo

Runs on two CPU cores in a few minutes, without a network. Writes runs/demo: a picture, a table, the adapter.
"""

import math
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from ..checkpoints.load import load
from ..evaluation.measures.rows import Row
from ..evaluation.report import write
from ..models import model_path
from ..patching.checks import check_model
from ..patching.describe import describe
from ..patching.patch import patch_model, unpatch_model
from .card import passkeys, versions
from .measurements import held_out_documents, measure_model
from .recipe import train
from .settings import MeasureSettings
from .settings_file import read_settings
from .stdlib import stdlib_texts

LENGTHS = (256, 512, 1024)
TRAINED = LENGTHS[0]
REACH = 1280
"""The target length of schemes: a quarter more than is measured, since they are weakest at the end."""
SCHEMES: dict[str, dict[str, Any]] = {
    "linear": {"target_length": REACH},
    "ntk": {"target_length": REACH},
    "dynamic_ntk": {"factor": REACH / TRAINED},
    "yarn": {"target_length": REACH},
}
TUNED, CONTROL = "yarn, tuned", "unpatched, tuned"
console = Console()


def measure_untrained(name: str, asked: MeasureSettings) -> list[Row]:
    """Measure the unpatched model, and each scheme without training."""
    model, tokenizer = load(name, dtype=torch.float32), AutoTokenizer.from_pretrained(model_path(name))
    documents = held_out_documents(list(stdlib_texts(held_out=True).values()), tokenizer, max(LENGTHS), asked)

    def figures(label: str) -> list[Row]:
        with console.status(f"measuring {label}"):
            return measure_model(model, tokenizer, documents, LENGTHS, asked, "causal", label)

    rows = figures("unpatched")
    for scheme, options in SCHEMES.items():
        patch_model(model, scheme, **options)
        rows += figures(scheme)
        unpatch_model(model)
    return rows


def train_recipe(recipe: str, output: Path, name: str, asked: MeasureSettings, steps: int) -> list[Row]:
    """Run a recipe with fewer steps, and return the results after it."""
    settings = read_settings(
        recipe,
        [
            f"--model.path={name}",
            f"--train.max_steps={steps}",
            f"--output={output / recipe}",
            f"--measure={{lengths: {list(LENGTHS)}, windows: {asked.windows}, passkeys: {asked.passkeys}}}",
        ],
    )
    with console.status(f"{recipe}: {steps} steps of LoRA"):
        return train(settings, resume=False, merged=recipe == "tiny_yarn", compared=False)


def table(rows: list[Row]) -> Table:
    shown = Table(title=f"Perplexity / passkeys found, by tokens read; the model was trained at {TRAINED}")
    shown.add_column("", no_wrap=True)
    for length in LENGTHS:
        shown.add_column(str(length), justify="right", no_wrap=True)
    for label in dict.fromkeys(row.scheme for row in rows):
        cells = [f"{perplexity(rows, label, n):6.1f} / {passkey_share(rows, label, n):4.0%}" for n in LENGTHS]
        shown.add_row(label, *cells)
    return shown


def perplexity(rows: list[Row], label: str, length: int) -> float:
    return next(r.value for r in rows if (r.metric, r.scheme, r.length) == ("perplexity", label, length))


def passkey_share(rows: list[Row], label: str, length: int) -> float:
    counted = passkeys(rows, label, length)
    return math.nan if counted is None else counted[0]


def story(rows: list[Row], asked: MeasureSettings) -> str:
    """The results in words."""
    base, far = (perplexity(rows, "unpatched", n) for n in (TRAINED, LENGTHS[-1]))
    best = min(SCHEMES, key=lambda scheme: perplexity(rows, scheme, LENGTHS[-1]))
    end = LENGTHS[-1]
    return (
        f"Unpatched, perplexity goes from {base:.1f} at {TRAINED} tokens to {far:.1f} at {end}, and passkeys found "
        f"from {passkey_share(rows, 'unpatched', TRAINED):.0%} to {passkey_share(rows, 'unpatched', end):.0%}.\n"
        f"Of the schemes without training, {best} has the lowest perplexity at {end}: "
        f"{perplexity(rows, best, end):.1f}; it finds {passkey_share(rows, best, end):.0%} of the passkeys.\n"
        f"After LoRA: {perplexity(rows, TUNED, end):.1f} and {passkey_share(rows, TUNED, end):.0%} with yarn, "
        f"{perplexity(rows, CONTROL, end):.1f} and {passkey_share(rows, CONTROL, end):.0%} without a scheme "
        "(the control).\n"
        f"The tuned models saw passkey examples in training (three of ten rows), so their scores are optimistic. "
        f"{asked.passkeys} trials at each length; the first integer that is written must be the key."
    )


@torch.no_grad()
def check(adapter: Path, merged: Path) -> str:
    """Check that the saved adapter has its scheme, and that the merged model computes the same."""
    model, whole = (load(path, dtype=torch.float32).eval() for path in (adapter, merged))
    check_model(model.get_base_model())
    ids = torch.arange(3, 515)[None] % model.config.vocab_size
    apart = (model(ids).logits - whole(ids).logits).abs().max().item()
    if describe(model.get_base_model()).scheme != "yarn" or apart > 1e-3:
        raise SystemExit(f"The adapter does not come back as it was: {apart:.2g} apart.")
    return f"{adapter} was loaded again: yarn, and its merged copy gives the same logits to {apart:.0e}."


def main(name: str, output: Path, steps: int, trials: int) -> None:
    started = time.monotonic()
    transformers.logging.set_verbosity_error()
    shutil.rmtree(output, ignore_errors=True)
    asked = MeasureSettings(windows=32, passkeys=trials)
    rows = measure_untrained(name, asked)
    console.print(table(rows))
    for recipe in ("tiny_control", "tiny_yarn"):
        rows += train_recipe(recipe, output, name, asked, steps)
    console.print(table(rows))
    console.print(story(rows, asked))
    about = {"title": "tiny, trained at 256 tokens", "trained_length": TRAINED, "versions": versions()}
    strict = [row for row in rows if row.protocol != "likelihood"]  # only generated answers count here
    for suffix in (".png", ".md"):
        write(strict, output / f"demo{suffix}", about)
    console.print(check(output / "tiny_yarn" / "adapter", output / "tiny_yarn" / "merged"))
    console.print(f"{output / 'demo.png'} shows it. {time.monotonic() - started:.0f} s.")


if __name__ == "__main__":
    given = dict(word.split("=", 1) for word in sys.argv[1:])
    main(
        given.get("model", "tiny"),
        Path(given.get("output", "runs/demo")),
        int(given.get("steps", 40)),
        int(given.get("trials", 50)),
    )
