"""Tiny random models of every family, and the cells of schemes x families that tests run over.

What is registered from outside is among them: `pytest --register FILE` imports a file before cells are made.
"""

import re
from functools import cache

import torch
import transformers
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_posenc import SCHEMES, UnsupportedCell, patch_model
from hf_posenc.core.effects import Effect, Geometry
from hf_posenc.families import FAMILIES, places
from hf_posenc.patching.grades import cell as grade_of
from hf_posenc.patching.records import Record

transformers.logging.set_verbosity_error()

VOCAB = 97
LENGTH = 32
"""What every tiny model is "trained" at."""

# With the usual 0.02 attention is all but uniform, and errors in positions hide.
_SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=LENGTH,
    initializer_range=0.3,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
_GQA = dict(num_key_value_heads=2)
KINDS: dict[str, dict] = {
    "llama": dict(model_type="llama", **_GQA),
    "mistral": dict(model_type="mistral", **_GQA),
    "qwen2": dict(model_type="qwen2", **_GQA),
    "qwen3": dict(model_type="qwen3", head_dim=8, **_GQA),
    "gpt2": dict(model_type="gpt2"),
    "bert": dict(model_type="bert"),
    "bert_decoder": dict(model_type="bert", is_decoder=True),
}


def from_outside() -> list[str]:
    """Model types of families that are registered from outside, and have a language-model head."""
    families = [FAMILIES[name] for name in FAMILIES if not FAMILIES.origin(name).built_in]
    types = [kind for family in families for kind in family.model_types if kind in CONFIG_MAPPING]
    heads = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING)
    return [kind for kind in types if any(CONFIG_MAPPING[kind] in head for head in heads)]


OUTSIDE = from_outside()
KINDS |= {kind: dict(model_type=kind) for kind in OUTSIDE}


def config_of(kind: str, **overrides):
    sizes = {**_SIZES, **KINDS[kind], **overrides}
    return AutoConfig.for_model(sizes.pop("model_type"), **sizes)


def is_causal(kind: str) -> bool:
    config = config_of(kind)
    return type(config) not in MODEL_FOR_MASKED_LM_MAPPING or bool(getattr(config, "is_decoder", False))


CAUSAL = [kind for kind in KINDS if is_causal(kind)]


def tiny(kind: str, seed: int = 0, **overrides) -> PreTrainedModel:
    """A tiny random model with a language-model head, in eval mode."""
    config = config_of(kind, **overrides)
    torch.manual_seed(seed)
    return (AutoModelForCausalLM if kind in CAUSAL else AutoModelForMaskedLM).from_config(config).eval()


COARSE = {"dynamic_ntk": {"step": 8}}
"""A pass rotates all keys once for each step past the trained length: a handful has every border that many have, and
costs a part of them. test_scaled_references.py follows every token."""


def options(scheme: str) -> dict:
    """What a scheme must be told, and what makes it show in a short text."""
    cls = SCHEMES[scheme]
    return {**(dict(cls.example) or ({"factor": 4.0} if cls.extends else {})), **COARSE.get(scheme, {})}


# --- what a kind of model is, asked of a live one ---


@cache
def _table(kind: str) -> str | None:
    model = tiny(kind)
    table = places(model).family.table
    return table and f"{model.base_model_prefix}.{table}"


TABLES = {kind: path for kind in KINDS if (path := _table(kind)) is not None}
"""Kinds with a position table, and where it is."""
ROTARY = [kind for kind in KINDS if places(tiny(kind)).has_rotary]


def no_dropout(kind: str) -> dict[str, float]:
    return {name: 0.0 for name, value in vars(config_of(kind)).items() if "drop" in name and isinstance(value, float)}


def projections(kind: str) -> list[str]:
    """The names of what makes q, k and v."""
    wanted = re.compile(r"[qkv]_proj|query|key|value|c_attn|qkv")
    found = {path.rpartition(".")[2] for path, _ in tiny(kind).named_modules()}
    return sorted(name for name in found if wanted.fullmatch(name))


# --- what a scheme does on it, asked of its effect ---


@cache
def geometry(kind: str) -> Geometry:
    return Record.from_dict(patch_model(tiny(kind), "none").config.posenc).geometry


@cache
def effect(scheme: str, kind: str) -> Effect:
    return SCHEMES[scheme].from_options(options(scheme)).effect(geometry(kind))


def table_of(scheme: str, kind: str) -> nn.Module | None:
    """What a scheme adds to the input, in the place of the model's own table or without one."""
    source = effect(scheme, kind).table
    if source is None or (not SCHEMES[scheme].adds_to_input and kind not in TABLES):
        return None
    native = nn.Embedding(LENGTH, geometry(kind).hidden_size) if kind in TABLES else None
    return source.module(native, torch.zeros(1))


def modules_of(scheme: str, kind: str) -> dict[str, nn.Module]:
    """The modules with numbers of their own that a scheme brings, by their place in the base model."""
    bias, table = effect(scheme, kind).bias, table_of(scheme, kind)
    place = TABLES[kind].partition(".")[2] if kind in TABLES else "posenc_table"
    return {name: module for name, module in (("posenc_bias", bias), (place, table)) if module is not None}


def trained_parameters(scheme: str, kind: str) -> set[str]:
    """The parameters that a scheme brings and trains, by their place in the base model."""
    return {
        f"{place}.{name}"
        for place, module in modules_of(scheme, kind).items()
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }


def _way(scheme: str) -> tuple[bool, ...]:
    """How a scheme is rendered."""
    does = effect(scheme, "llama")
    slopes = does.bias is not None and does.bias.key_slopes is not None
    turns = does.rotation is not None
    late = turns and does.rotation.follows_length
    scaled = turns and does.rotation.attention_scaling != 1
    return does.bias is not None, slopes, does.table is not None, turns, late, scaled, does.pattern is not None


TEXT = [scheme for scheme in SCHEMES if not grade_of(scheme, "RoPE").startswith("refused")]
"""Schemes that are not for images alone."""
PATTERNS = [scheme for scheme in TEXT if effect(scheme, "llama").pattern is not None]
ONE_OF_EACH = list({_way(scheme): scheme for scheme in TEXT}.values())
"""A scheme for each way to render."""


FEW = ("llama", "bert")
ON_FEW = {
    "kerple": FEW,
    "sandwich": FEW,
    "clip": FEW,
    "shaw": ("llama", "gpt2", "bert"),
    "transformer_xl": FEW,
    "deberta": FEW,
    "fox": ("llama", "gpt2"),
    "cable": ("llama",),
    "string": FEW,
    "fire": ("llama", "gpt2", "bert"),
}
"""Schemes whose way through a model others go on every kind: these kinds show that theirs is the same."""


def refuses(scheme: str, kind: str) -> bool:
    """Whether a scheme says by itself that it makes no sense here; that patch_model then refuses is a law."""
    try:
        return effect(scheme, kind).forgets and bool(getattr(config_of(kind), "sliding_window", None))
    except UnsupportedCell:
        return True


def exists(scheme: str, kind: str) -> bool:
    if refuses(scheme, kind) or (scheme in PATTERNS and kind in TABLES):
        return False  # patterns that keep a table keep its length: test_patterns.py has them on tables
    if kind not in (*ON_FEW.get(scheme, KINDS), *OUTSIDE):
        return False
    # Qwen2 is a LLaMA whose projections have biases; what is registered from outside is like something here as well.
    return kind not in ("qwen2", *OUTSIDE) or scheme in ONE_OF_EACH or not SCHEMES.origin(scheme).built_in


CELLS = [(scheme, kind) for scheme in TEXT for kind in KINDS if exists(scheme, kind)]
CAUSAL_CELLS = [(scheme, kind) for scheme, kind in CELLS if kind in CAUSAL]
REFUSED_CELLS = [(scheme, kind) for scheme in TEXT for kind in KINDS if refuses(scheme, kind)]


def tokens(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))
