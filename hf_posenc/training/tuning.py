"""Which parameters are trained: LoRA on projections, and norms, embeddings and positions."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..compat.adapters import knows_embeddings
from ..core.tables import LearnedTable
from ..errors import PosencError
from ..families import Places, places
from ..patching.growth import new_rows
from .master_weights import keep_master_weights, master
from .settings import TuneSettings

TASKS = {"causal": "CAUSAL_LM"}
LAYER = re.compile(r".*\.\d+\.")
"""The path to a layer; the names after it are the same in all layers."""


def choose_trainable(model: PreTrainedModel, asked: TuneSettings, objective: str) -> Any:
    """The model with its trainable parameters chosen; wrapped by PEFT if there is LoRA."""
    if asked.whole:
        model.requires_grad_(True)
        keep_master_weights(model)
        return model
    saved = whole_modules(model, asked)
    masks = list(new_rows(model).values()) if asked.positions == "new" else []
    if asked.lora is None:
        if not saved:
            raise PosencError("Nothing would be trained: turn on tune.lora, norms, embeddings, positions or whole.")
        model.requires_grad_(False)
        for name, module in model.named_modules():
            if name.endswith(tuple(saved)):
                module.requires_grad_(True)
        wrapped: Any = model
    else:
        from peft import LoraConfig, get_peft_model  # takes seconds

        ends = [name.rpartition(".")[2] for name in saved]
        config = LoraConfig(
            task_type=TASKS.get(objective),
            r=asked.lora.r,
            lora_alpha=asked.lora.lora_alpha,  # type: ignore[arg-type]
            lora_dropout=asked.lora.lora_dropout,
            use_rslora=asked.lora.use_rslora,
            use_dora=asked.lora.use_dora,
            target_modules=lora_targets(places(model), asked.lora.target_modules),
            modules_to_save=saved or None,
            # PEFT keeps input and output embeddings tied only if it knows their names.
            ensure_weight_tying=bool(model.config.tie_word_embeddings) and knows_embeddings(ends),
        )
        wrapped = get_peft_model(model, config)
    keep_master_weights(wrapped)
    if masks:
        keep_old_rows(wrapped, masks)
    return wrapped


def lora_targets(where: Places, asked: str | list[str]) -> str | list[str]:
    """Names of projections for PEFT: those of attention, all linear layers, or the given ones."""
    if asked != "attention":
        return asked
    layers = [attention for stack in where.stacks for attention in stack.attentions]
    if not layers:
        raise PosencError("No attention layer was found to adapt. Name projections: tune.lora.target_modules: [...].")
    names = {id(module): name for name, module in where.model.named_modules()}
    found = set()
    for layer in layers:
        name = names[id(layer)]
        # BERT and its kin keep the output projection of `attention.self` beside it, in `attention.output`.
        root = where.model.get_submodule(name.rpartition(".")[0]) if name.endswith(".self") else layer
        found |= {LAYER.sub("", names[id(m)]) for m in root.modules() if isinstance(m, nn.Linear | Conv1D)}
    return sorted(found)


def whole_modules(model: PreTrainedModel, asked: TuneSettings) -> list[str]:
    """Names of modules that are trained and saved whole."""
    chosen: list[nn.Module] = []
    if asked.norms:
        chosen += [module for module in model.modules() if "norm" in type(module).__name__.lower()]
    if asked.embeddings:
        chosen.append(model.get_input_embeddings())
    if asked.positions != "none":
        chosen += position_modules(model)
    wanted = {id(module) for module in chosen}
    return sorted({LAYER.sub("", name) for name, module in model.named_modules() if id(module) in wanted})


def position_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Modules with parameters that a scheme added: a learned table, a bias."""
    brought = [m for name, m in model.named_modules() if name.rpartition(".")[2].startswith("posenc_")]
    tables = [m for m in model.modules() if isinstance(m, LearnedTable)]
    return [m for m in dict.fromkeys([*tables, *brought]) if any(True for _ in m.parameters())]


def keep_old_rows(wrapped: Any, masks: list[Tensor]) -> None:
    """Train only the rows of learned tables that the patch added."""
    held = [master(m, "weight") for m in wrapped.modules() if isinstance(m, LearnedTable)]
    trained = [weight for weight in held if weight is not None and weight.requires_grad]
    for weight, new in zip(trained, masks, strict=True):
        weight.register_hook(lambda grad, new=new: grad * new[:, None].to(grad))


def count_trainable(model: Any) -> int:
    """The number of trained parameters."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def estimate_trainable(model: Any, asked: TuneSettings) -> int:
    """About how many parameters `choose_trainable` would train, without creating adapters."""
    if asked.whole:
        return sum(p.numel() for p in model.parameters())
    ends = tuple(whole_modules(model, asked)) or ("no such module",)
    own = {id(p): p.numel() for n, m in model.named_modules() if n.endswith(ends) for p in m.parameters()}
    rank = 0 if asked.lora is None else asked.lora.r
    return sum(own.values()) + sum(rank * sum(layer_sizes(m)) for m in layers_to_adapt(model, asked))


def layers_to_adapt(model: Any, asked: TuneSettings) -> list[Any]:
    """The projections that `choose_trainable` would put adapters on."""
    if asked.lora is None:
        return []
    wanted = lora_targets(places(model), asked.lora.target_modules)
    head = model.get_output_embeddings() if isinstance(wanted, str) else None  # "all-linear" is all but this
    linear = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D) and m is not head]
    return [m for n, m in linear if isinstance(wanted, str) or n.endswith(tuple(wanted))]


def layer_sizes(layer: Any) -> tuple[int, int]:
    """The input and output size of a projection, also for 4-bit weights, whose shape differs."""
    return (layer.nx, layer.nf) if isinstance(layer, Conv1D) else (layer.in_features, layer.out_features)
