"""Every scheme on a tiny random LLaMA, GPT-2 and BERT: what it changes, and that it can be taken back.

    python recipes/demo.py

Needs no network and no GPU, and takes a few seconds.
"""

from dataclasses import fields

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel

from hf_posenc import SCHEMES, UnsupportedCell, describe, patch_model, unpatch_model

TRAINED = 64
SIZES = dict(
    vocab_size=100,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=TRAINED,
    initializer_range=0.3,  # far from uniform attention, so that positions matter
)
FAMILIES = {"llama": AutoModelForCausalLM, "gpt2": AutoModelForCausalLM, "bert": AutoModelForMaskedLM}


def tiny(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return FAMILIES[family].from_config(AutoConfig.for_model(family, **SIZES)).eval()


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    return model(torch.arange(2 * 48).view(2, 48)).logits


def options(scheme: str) -> dict[str, int]:
    """Extending schemes must be told how far to reach, and windows be small, to show in a short text."""
    known = {field.name for field in fields(SCHEMES[scheme])}
    given = {"window": 8, "chunk": 16}
    reach = {"target_length": 4 * TRAINED} if SCHEMES[scheme].extends or scheme == "learned" else {}
    return reach | {name: value for name, value in given.items() if name in known}


def cell(model: PreTrainedModel, scheme: str) -> tuple[str, ...]:
    """How much a scheme changes the logits, whether unpatching restores every bit, and who can load the result."""
    plain = logits(model)
    try:
        patch_model(model, scheme, **options(scheme))
    except UnsupportedCell:
        return ("[dim]refused[/]",)
    change = (logits(model) - plain).abs().max().item()
    grade = describe(model).portability.partition(":")[0]
    exact = torch.equal(logits(unpatch_model(model)), plain)
    return f"{change:.2f}", "[green]exact[/]" if exact else "[red]NOT EXACT[/]", grade


def main() -> None:
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # models this small only wait for more
    console = Console()
    models = {family: tiny(family) for family in FAMILIES}
    table = Table(title="Largest change of logits, whether unpatch_model is exact, and portability")
    table.add_column("scheme", no_wrap=True)
    for family in models:
        table.add_column(family, justify="right", no_wrap=True)
    for scheme in SCHEMES:
        table.add_row(scheme, *(" ".join(cell(model, scheme)) for model in models.values()))
    console.print(table)
    console.print("0.00: on a RoPE model, rope is what was there, and dynamic_ntk begins past the trained length.")
    console.print("refused: schemes that change what a RoPE is told need a model with one, and axial_rope images.")
    console.print("\ndescribe(patch_model(llama, 'yarn', target_length=256)):\n")
    print(describe(patch_model(models["llama"], "yarn", target_length=256)))


if __name__ == "__main__":
    main()
