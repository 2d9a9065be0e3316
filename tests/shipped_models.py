"""Models as small as can be, of the kinds that the recipes of the package name, in files that recipes can read."""

import argparse
import inspect
import subprocess
import typing
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from hf_posenc.models import model_path
from hf_posenc.training.recipe_files import recipes

SIZES = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=1, intermediate_size=32, initializer_range=0.3)
KINDS = {
    "llama": (AutoModelForCausalLM, dict(max_position_embeddings=4096)),
    "gpt2": (AutoModelForCausalLM, dict(max_position_embeddings=1024)),
    "bert": (AutoModelForMaskedLM, dict(max_position_embeddings=512)),
    "minilm": (AutoModel, dict(max_position_embeddings=512)),
}
NO_DROPOUT = {
    "gpt2": dict(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0),
    "bert": dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
}
"""Which would draw other numbers in other precisions."""
SHORT = 30_000
"""Characters of the shorter text."""


def fill(folder: Path) -> None:
    """Every kind of model with its tokenizer, one long text, and a part of it that takes no time to read."""
    tokenizer = AutoTokenizer.from_pretrained(model_path("tiny"))
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    for kind, (auto, sizes) in KINDS.items():
        torch.manual_seed(0)
        name = "bert" if kind == "minilm" else kind
        config = AutoConfig.for_model(name, vocab_size=len(tokenizer), **SIZES, **sizes, **NO_DROPOUT.get(name, {}))
        model = auto.from_config(config).bfloat16().float()  # values that both precisions hold
        model.save_pretrained(folder / kind)
        tokenizer.save_pretrained(folder / kind)
    sources = [inspect.getsource(module) for module in (argparse, inspect, subprocess, typing)]
    (folder / "text.txt").write_text("".join(sources))
    (folder / "short.txt").write_text(sources[0][:SHORT])


def words(name: str, models: Path) -> list[str]:
    """What a recipe must be told to run on these: where its model and its data are, and nothing else."""
    kind = name.partition("_")[0]
    given = [f"--data.path={models / 'text.txt'}"]
    return given if kind == "tiny" else [*given, f"--model.path={models / kind}"]


def without_dropout(name: str) -> list[str]:
    fresh = next((keys for kind, keys in NO_DROPOUT.items() if name.startswith(f"tiny_{kind}")), {})
    lora = ["--tune.lora.lora_dropout=0.0"] if "lora_dropout" in recipes()[name].read_text() else []
    return [f"--model.config.{key}={value}" for key, value in fresh.items()] + lora
