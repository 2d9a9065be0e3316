"""Context parallelism, where several processes share a text: allow what is correct, refuse everything else.

Each process holds several separate stretches of a text, and only torch's causal kernel sees the keys of the others. So
positions must be passed explicitly, keys must not depend on the query, and masks are ignored.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate import ParallelismConfig
from torch import Tensor
from torch.utils.data import IterableDataset

from ..compat.models import attention_of
from ..errors import PosencError
from ..patching.patch import set_rendering
from ..patching.patch_state import links
from ..runtime.attention_call import Call
from ..runtime.positions import PREFIX
from .loss import shift_labels
from .recipe_files import launch_option
from .settings import Settings

DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")
"""Names of attention dropout in configs."""
LEAP = 7
"""A gap between two positions, to test whether a layer uses given positions or counts tokens."""


def launcher_parallelism() -> Any:
    """The launcher's parallelism config, available before there is an accelerator; None if there is none."""
    asked = os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true"
    return ParallelismConfig() if asked else None


def launcher_shards() -> bool:
    """Whether the launcher shards parameters."""
    return any(os.environ.get(f"ACCELERATE_USE_{way}", "false").lower() == "true" for way in ("FSDP", "DEEPSPEED"))


def refuse_zero3() -> None:
    """Raise under ZeRO-3: transformers shards weights while loading, but patching needs whole ones."""
    asked = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    if asked and os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE") == "3":
        raise PosencError(
            "Recipes do not run under DeepSpeed's ZeRO-3, which leaves no whole weights to patch. Launch with "
            f"{launch_option('fsdp2')}, which shards parameters too."
        )


def processes_per_text(parallel: Any) -> int:
    """How many processes share each text."""
    return 1 if parallel is None else int(parallel.cp_size)


def refuse_sharded_text(settings: Settings, parallel: Any, rows: Any) -> None:
    """Raise for data that context parallelism would compute wrongly, since it has only the causal mask."""
    if parallel is not None and (parallel.sp_enabled or parallel.tp_enabled):
        raise PosencError(
            "The launch asks for tensor or Ulysses sequence parallelism, which recipes do not support. To share long "
            f"texts launch with {launch_option('context_parallel')}."
        )
    processes = processes_per_text(parallel)
    if processes == 1:
        return
    data = settings.data
    if data.documents == "separate" or data.short is not None:
        raise PosencError(
            "Under context parallelism attention would cross document boundaries, since masks are dropped there. "
            "Set data.documents: joined, without data.short."
        )
    if data.answer_weight != 1 or settings.model.objective != "causal":
        raise PosencError("Context parallelism is for causal models, with data.answer_weight: 1.")
    if isinstance(rows, IterableDataset):
        raise PosencError(
            "A stream of text is distributed row by row, so processes that share a text would each get another one. "
            "Set data.streaming: false."
        )
    uneven = [length for length in data.lengths if length % (2 * processes)]
    if uneven:
        raise PosencError(
            f"{processes} processes share a text in {2 * processes} equal parts, and rows of {uneven[0]} tokens "
            f"cannot be split so: use a multiple of {2 * processes} (data.length, data.stages)."
        )


def refuse_lost_rows(settings: Settings, sharded: bool) -> None:
    """Raise if old rows of a table would be trained too: sharding drops the hook that keeps them fixed."""
    if sharded and settings.tune.positions == "new":
        raise PosencError(
            "tune.positions: new keeps the old rows of a table fixed by a gradient hook, which is lost where "
            f"weights are sharded. Launch with {launch_option('ddp')}, or set tune.positions: all."
        )


def refuse_sharded_bits(settings: Settings, sharded: bool) -> None:
    """Raise if 4-bit weights would be sharded: two of them share a byte, and blocks share a scale."""
    if sharded and settings.model.quantize is not None:
        raise PosencError(
            "model.quantize holds weights whole on each device, and this launch shards them. Launch with "
            f"{launch_option('ddp')}, or leave it out."
        )


def prepare_shared_text(model: Any) -> None:
    """Prepare a model for shared texts, or raise."""
    name = attention_of(model.config)
    if name not in ("sdpa", PREFIX + "sdpa"):
        raise PosencError(
            f"Context parallelism works only with torch's own attention, and the model uses {name!r}. Set "
            "model.attn_implementation: sdpa."
        )
    dropped = [key for key in DROPOUTS if getattr(model.config, key, 0)]
    if dropped:
        raise PosencError(
            f"The model has attention dropout ({dropped[0]}). Under context parallelism its gradient would be wrong, "
            f"since only the last of several masks is kept. Set {dropped[0]} to 0 in its config."
        )
    patched = links(model.modules())
    why = next(filter(None, (non_causal_need(link) for _, link in patched)), None)
    if why is not None:
        raise PosencError(
            f"Context parallelism supports only causal attention, and the scheme "
            f"{model.config.posenc['scheme']!r} {why}. Schemes that rescale RoPE once ('linear', 'ntk', 'yarn'), "
            f"'alibi' and tables work there. Or train without it ({launch_option('fsdp2')})."
        )
    if any(link.bias is not None for _, link in patched):
        set_rendering(model, "shared_columns")
    refuse_counted_positions(model, [module for module, _ in patched])


def non_causal_need(link: Any) -> str | None:
    """What an attention layer needs besides the causal mask."""
    if link.shared.pattern is not None:
        return "chooses keys, or changes their distances"
    if link.shared.rotates_after_caching:
        return "rotates all keys again for each length"
    if link.bias is not None and link.bias.key_slopes is None:
        return "adds a bias to each pair of tokens"
    return None


def refuse_counted_positions(model: Any, layers: list[Any]) -> None:
    """Raise if layers count tokens instead of using given positions: they would count within a part."""
    told: list[bool] = []
    wanted = torch.tensor([[0, LEAP]], device=model.device)

    def look(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        call: Call = kwargs["posenc_call"]
        told.append(bool(torch.equal(call.query.expand(1, -1).to(wanted), wanted)))

    hooks = [layer.register_forward_pre_hook(look, with_kwargs=True) for layer in layers]
    try:
        with torch.no_grad():
            ones = torch.ones_like(wanted)
            model(input_ids=ones, position_ids=wanted, attention_mask=ones, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    if not all(told):
        raise PosencError(
            f"The attention layers of this {model.config.model_type!r} model do not get positions, and would count "
            "tokens within their part of a text. It cannot be trained under context parallelism."
        )


def unsplit_inputs(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inputs to be split: with shifted targets, and a mask so that gaps are not taken for boundaries."""
    positions, mask = inputs["position_ids"], inputs.get("attention_mask")
    if mask is not None and not bool(mask.all()):
        raise PosencError("These rows are padded or masked, and masks are dropped under context parallelism.")
    if bool((positions.diff(dim=-1) <= 0).any()):
        raise PosencError("These rows hold several texts, and attention would cross from one to the next.")
    return {
        "input_ids": inputs["input_ids"],
        "position_ids": positions,
        "attention_mask": torch.ones_like(positions),
        "shift_labels": shift_labels(inputs["labels"]),
    }
