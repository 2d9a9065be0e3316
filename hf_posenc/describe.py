"""What a live model does with positions, read from its modules."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionMaskInterface, PreTrainedModel

from .families import Places, places
from .grades import MEANING, grade, is_sealed
from .measure import own_rope
from .patch import journal_of, refuse_strangers
from .positions import PREFIX, before_attention
from .records import Record
from .registry import PosencError
from .render import before_embeddings, before_first_layer, rotary_class
from .rotary import SEALED, Rotary
from .schemes.rotary import RotaryScheme
from .sites import Effect
from .tables import ComputedTable, LearnedTable, ZeroTable


@dataclass(frozen=True)
class Description:
    """The answer of `describe`. Print it, or read its fields."""

    model: str
    scheme: str
    options: dict[str, Any]
    trained_length: int
    target_length: int
    """What the config promises."""
    factor: float | None
    rope_theta: float | None
    effective_theta: float | None
    """The theta of a plain RoPE whose slowest pair turns as the live one does."""
    shortest_wavelength: float | None
    """In tokens."""
    longest_wavelength: float | None
    pairs: int
    """Rotary pairs that turn at all; 0 where the rotation is switched off."""
    pairs_below_one_turn: int
    """Those of them that turn less than once within the trained length."""
    attention_scaling: float
    """What cos and sin are multiplied by: scores are scaled by its square."""
    kernel: str
    table: str
    bias: str
    portability: str

    def __str__(self) -> str:
        lines = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None or value == {}:
                continue
            text = f"{value:.6g}" if isinstance(value, float) else str(value)
            lines.append(f"{field.name.replace('_', ' '):<22}{text}")
        return "\n".join(lines)


def describe(model: Any) -> Description:
    """Tell how the live model knows positions. Frequencies and scales are read from its modules."""
    model = bare(model)
    where = places(model)
    record = record_of(where)
    inv_freq, scaling = live_rotation(where)
    turning = [f for f in inv_freq.tolist() if f > 0]
    trained = record.geometry.trained_length if record else where.config.max_position_embeddings
    rope = getattr(where.config, "rope_parameters", None) if where.rotary is not None else None
    return Description(
        model=f"{type(model).__name__} ({where.config.model_type})",
        scheme=record.scheme.name if record else own_scheme(where),
        options=record.scheme.options() if record else {},
        trained_length=trained,
        target_length=where.config.max_position_embeddings,
        factor=record.scheme.span(record.geometry).factor if record else (rope or {}).get("factor"),
        rope_theta=_theta(rope, record) if turning else None,
        effective_theta=effective_theta(turning, len(inv_freq)),
        shortest_wavelength=2 * math.pi / max(turning) if turning else None,
        longest_wavelength=2 * math.pi / min(turning) if turning else None,
        pairs=len(turning),
        pairs_below_one_turn=sum(f * trained < 2 * math.pi for f in turning),
        attention_scaling=scaling,
        kernel=where.config._attn_implementation,
        table=_table(where),
        bias=str(getattr(where.base, "posenc_bias", "none")),
        portability=_portability(where, record),
    )


def bare(model: Any) -> PreTrainedModel:
    """The transformers model inside a PEFT or compiled one."""
    model = getattr(model, "_orig_mod", model)
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    refuse_strangers(model)
    return model


def _portability(where: Places, record: Record | None) -> str:
    if record is None:
        return "unpatched"
    found = grade(record.scheme.effect(record.geometry), where.rotary is not None)
    return f"{found}: {MEANING[found]}"


def _theta(rope: dict[str, Any] | None, record: Record | None) -> float | None:
    if rope is not None and rope.get("rope_type") != SEALED:
        return rope["rope_theta"]
    scheme = record.scheme if record else None
    return scheme.theta(record.geometry) if record and isinstance(scheme, RotaryScheme) else None


def own_scheme(where: Places) -> str:
    """An unpatched model's scheme, in our words."""
    if where.rotary is None:
        return "learned (the model's own)"
    return f"{where.config.rope_parameters.get('rope_type', 'default')} RoPE (the model's own)"


def effective_theta(turning: list[float], pairs: int) -> float | None:
    if len(turning) < 2:
        return None
    return float(min(turning) ** (-pairs / (len(turning) - 1)))


def live_rotation(where: Places) -> tuple[Tensor, float]:
    """The frequencies and the scale that q and k are turned with right now."""
    shared = getattr(where.base, "posenc", None)
    if shared is not None and shared.rotation is not None:
        return shared.inv_freq.float().cpu(), shared.rotation.attention_scaling
    if where.rotary is not None:
        return where.rotary.inv_freq.float().cpu(), float(where.rotary.attention_scaling)
    return torch.zeros(0), 1.0


def _table(where: Places) -> str:
    table = where.table if where.table is not None else getattr(where.base, "posenc_table", None)
    return "none" if table is None else str(table)


def record_of(where: Places) -> Record | None:
    data = getattr(where.config, "posenc", None)
    return None if data is None else Record.from_dict(data)


def check_model(model: Any) -> None:
    """Raise where the live model does not do what its config says, with every disagreement found."""
    model = bare(model)
    where = places(model)
    record = record_of(where)
    if record is None and journal_of(model) is not None:
        faults = ["the model is patched, and its config has lost the 'posenc' record"]
    elif record is None:
        faults = _rotary_faults(where, None)
    elif journal_of(model) is None:
        faults = [
            f"the config says that the model is patched with {record.scheme.name!r}, and no patch is in place; "
            "load the checkpoint with hf_posenc.load"
        ]
    else:
        effect = record.scheme.effect(record.geometry)
        faults = _rotary_faults(where, effect) + _attention_faults(where, effect) + _table_faults(where, effect)
    if faults:
        raise PosencError("The model and its config disagree: " + "; ".join(faults) + ".")


def _rotary_faults(where: Places, effect: Effect | None) -> list[str]:
    if where.rotary is None:
        return []
    kind = own_rope(where)["rope_type"]
    moving = effect is None and kind in ("dynamic", "longrope")  # transformers' own change with each call
    live = (where.rotary.original_inv_freq if moving else where.rotary.inv_freq).float().cpu()
    if kind == SEALED:
        return [] if not live.any() and isinstance(where.rotary, Rotary) else ["the rotation is not switched off"]
    fresh = rotary_class(where)(config=where.config)
    half = where.rotary.inv_freq.dtype != torch.float32
    faults = []
    near = 1e-2 if half else 1e-5
    if fresh.inv_freq.shape != live.shape or not torch.allclose(fresh.inv_freq, live, rtol=near, atol=0.0):
        faults.append(
            f"config.rope_parameters ({kind!r}) means other frequencies than the live rotary module has; a config "
            "edited after construction changes nothing, use patch_model"
        )
    if not math.isclose(fresh.attention_scaling, where.rotary.attention_scaling, rel_tol=1e-5):
        faults.append(
            f"the config means an attention scale of {fresh.attention_scaling:g}, the live module has "
            f"{where.rotary.attention_scaling:g}"
        )
    if effect is not None:
        if not isinstance(where.rotary, Rotary):
            faults.append("the rotary module of the patch was replaced")
        wanted = torch.zeros(len(live))
        if effect.rotation is not None and not is_sealed(effect, True):
            wanted = torch.tensor(effect.rotation.inv_freq)
        if not torch.allclose(live, wanted, rtol=1e-5, atol=0):
            faults.append("the live frequencies are not those of the scheme")
    return faults


def _attention_faults(where: Places, effect: Effect) -> list[str]:
    name, sealed = where.config._attn_implementation, is_sealed(effect, where.rotary is not None)
    if not sealed:
        return [f"the scheme needs no {name!r}"] if name.startswith(PREFIX) else []
    faults = []
    if not name.startswith(PREFIX):
        faults.append(f"the attention is {name!r}, which drops the scheme; set it to {PREFIX + 'sdpa'!r}")
    elif name not in AttentionMaskInterface._global_mapping:
        faults.append(f"no mask function is registered for {name!r}, so that padding would be seen")
    hooked = [before_attention in a._forward_pre_hooks.values() for a in where.attentions]
    if not all(hooked):
        faults.append(f"{hooked.count(False)} of {len(hooked)} attention layers have lost their hook")
    return faults + _shared_faults(where, effect)


def _shared_faults(where: Places, effect: Effect) -> list[str]:
    shared, bias = getattr(where.base, "posenc", None), getattr(where.base, "posenc_bias", None)
    if shared is None:
        return ["the base model has lost its 'posenc' module"]
    faults, rotation = [], effect.rotation
    if rotation is not None and (where.rotary is None or rotation.follows_length):
        live = shared.inv_freq.float().cpu()
        if shared.rotation != rotation or not torch.equal(live, torch.tensor(rotation.inv_freq)):
            faults.append("the live frequencies are not those of the scheme")
    if (effect.bias is None) != (bias is None):
        faults.append("the bias of the scheme is missing" if effect.bias else "there is a bias that the scheme lacks")
    elif effect.bias is not None and bias is not None:
        live_buffers = dict(bias.named_buffers())
        for key, wanted in effect.bias.named_buffers():
            if key in live_buffers and not torch.equal(live_buffers[key].cpu(), wanted):
                faults.append(f"{key} of the bias are not those of the scheme")
    return faults


def _table_faults(where: Places, effect: Effect) -> list[str]:
    faults = []
    if where.embeddings is not None and before_embeddings not in where.embeddings._forward_pre_hooks.values():
        faults.append("the embeddings have lost their hook")
    added = where.table is None and effect.table is not None
    if added and before_first_layer not in where.layers[0]._forward_pre_hooks.values():
        faults.append("the first layer has lost the hook that adds positions")
    own = where.table if where.table is not None else getattr(where.base, "posenc_table", None)
    inner: Any = getattr(own, "original_module", own)  # peft keeps trained copies behind a wrapper
    if inner is None:
        return [*faults, "the position table of the scheme is missing"] if effect.table is not None else faults
    if not isinstance(inner, (ComputedTable, LearnedTable)):
        return [*faults, f"the position table is a {type(inner).__name__}, not the one that the patch put there"]
    wanted = _wanted_table(where, effect, inner)
    if str(wanted) != str(inner) or not _same_buffers(wanted, inner):
        faults.append(f"the position table is {inner}, and the scheme means {wanted}")
    if isinstance(inner, LearnedTable) and inner.num_embeddings != where.config.max_position_embeddings:
        promise = where.config.max_position_embeddings
        faults.append(f"the table has {inner.num_embeddings} rows and the config promises {promise}")
    return faults


def _wanted_table(where: Places, effect: Effect, inner: Any) -> nn.Module:
    like = inner.weight if isinstance(inner, LearnedTable) else inner.anchor
    if effect.table is None:
        return ZeroTable(inner.size if isinstance(inner, ComputedTable) else inner.embedding_dim, None, like)
    native = inner if isinstance(inner, LearnedTable) and where.table is not None else None
    return effect.table.restored(native, like)


def _same_buffers(one: nn.Module, other: nn.Module) -> bool:
    theirs = dict(other.named_buffers())
    return all(torch.equal(buffer, theirs[name]) for name, buffer in one.named_buffers())
