"""What a live model does with positions, read from its modules."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import PosencError
from ..families import Group, ImagePlaces, Places, Stack, image_places, places
from ..runtime.rotary import SEALED, STILL, scaling_of
from ..schemes.rotary import RotaryScheme
from .checks import attention_faults, rotary_faults, table_faults
from .embedders import inner_model
from .grades import MEANING, grade
from .image_checks import ImageDescription, describe_images, image_faults, listed
from .measure import chosen, own_length, own_rope, rope_of
from .patch import journal_of, refuse_strangers
from .records import Record
from .seal import seal_faults


@dataclass(frozen=True)
class Description:
    """The answer of `describe`. Print it, or read its fields."""

    model: str
    scheme: str
    options: dict[str, Any]
    layers: str
    """Which of them, where a model has layers of several types."""
    trained_length: int | None
    target_length: int | None
    """What the config promises."""
    factor: float | None
    rope_theta: float | None
    effective_theta: float | None
    """The theta of a plain RoPE whose slowest pair rotates as the live one does."""
    shortest_wavelength: float | None
    """In tokens."""
    longest_wavelength: float | None
    pairs: int
    """Rotary pairs that rotate at all; 0 where the rotation is switched off."""
    pairs_below_one_turn: int
    """Those of them that rotate less than once within the trained length."""
    attention_scaling: float
    """What cos and sin are multiplied by: scores are scaled by its square."""
    kernel: str
    table: str
    bias: str
    portability: str

    def __str__(self) -> str:
        return listed(self)


def describe(model: Any) -> Description | ImageDescription:
    """Tell how the live model knows positions. Frequencies and scales are read from its modules."""
    model = bare(model)
    images = image_places(model)
    if images is not None:
        return describe_images(images, record_of(images))
    where = places(model)
    record = record_of(where)
    group = _group(where, record)
    inv_freq, scaling = live_rotation(group)
    if switched(where):
        inv_freq = torch.zeros(0)
    rotating = [f for f in inv_freq.tolist() if f > STILL]
    trained = record.geometry.trained_length if record else own_length(where)
    rope = rope_of(where.config, group.layer_type) if where.has_rotary else None
    return Description(
        model=f"{type(model).__name__} ({where.config.model_type})",
        scheme=record.scheme.name if record else own_scheme(where),
        options=record.scheme.options() if record else {},
        layers=", ".join(record.geometries) if record else group.layer_type,
        trained_length=trained,
        target_length=own_length(where),
        factor=record.scheme.span(record.geometry).factor if record else (rope or {}).get("factor"),
        rope_theta=_theta(rope, record) if rotating else None,
        effective_theta=effective_theta(rotating, len(inv_freq)),
        shortest_wavelength=2 * math.pi / max(rotating) if rotating else None,
        longest_wavelength=2 * math.pi / min(rotating) if rotating else None,
        pairs=len(rotating),
        pairs_below_one_turn=sum(f * (trained or 0) < 2 * math.pi for f in rotating),
        attention_scaling=scaling,
        kernel=where.config._attn_implementation,
        table=_table(where),
        bias=_bias(where, group),
        portability=_portability(where, record),
    )


def bare(model: Any) -> PreTrainedModel:
    """The transformers model inside a PEFT or compiled one, or in a SentenceTransformer."""
    model = inner_model(getattr(model, "_orig_mod", model))
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    refuse_strangers(model)
    return model


def _group(where: Places, record: Record | None) -> Group:
    """The layers to speak of: the first that are patched, or those that look furthest."""
    groups = {group.name: group for group in where.groups()}
    if record is not None:
        return groups[next(iter(record.geometries))]
    return chosen(where, None)[0]


def _portability(where: Places, record: Record | None) -> str:
    if record is None:
        return "unpatched"
    found = next(iter({grade(effect, where.family) for effect in record.effects().values()}))
    return f"{found}: {MEANING[found]}"


def _theta(rope: dict[str, Any] | None, record: Record | None) -> float | None:
    if rope is not None and rope.get("rope_type") != SEALED:
        return rope["rope_theta"]
    if record is None:
        return None
    if isinstance(record.scheme, RotaryScheme):
        return record.scheme.theta(record.geometry)
    return record.geometry.rope["rope_theta"] if record.geometry.rope else None


def own_scheme(where: Places) -> str:
    """An unpatched model's scheme, in our words."""
    if not where.has_rotary or switched(where):
        return f"{where.family.positions} (the model's own)"
    kinds = {own_rope(group)["rope_type"] for group in where.groups() if rope_of(where.config, group.layer_type)}
    return f"{'/'.join(sorted(kinds))} RoPE (the model's own)"


def switched(where: Places) -> bool:
    """Whether the config has put another kind of positions in place of the family's usual one."""
    switch = where.family.switch
    return switch is not None and bool(getattr(where.config, switch[0]))


def effective_theta(rotating: list[float], pairs: int) -> float | None:
    if len(rotating) < 2:
        return None
    return float(min(rotating) ** (-pairs / (len(rotating) - 1)))


def live_rotation(group: Group) -> tuple[Tensor, float]:
    """The frequencies and the scale that q and k are rotated with right now."""
    for attention in group.attentions:
        link = vars(attention).get("posenc_link")
        if link is not None and link.root is not None and link.shared.rotation is not None:
            return link.shared.inv_freq.float().cpu(), link.shared.rotation.attention_scaling
    inv_freq = group.inv_freq()
    if inv_freq is not None:
        return inv_freq.float().cpu(), scaling_of(group.stack.rotaries[0].module, group.layer_type)
    return torch.zeros(0), 1.0


def _table(where: Places) -> str:
    tables = [live_table(stack) for stack in where.stacks]
    return str(next((table for table in tables if table is not None), "none"))


def live_table(stack: Stack) -> Any:
    return stack.table.module if stack.table is not None else getattr(stack.root, "posenc_table", None)


def _bias(where: Places, group: Group) -> str:
    links = [vars(a).get("posenc_link") for a in group.attentions]
    found = [link.bias for link in links if link is not None and link.root is not None]
    biased = where.has_bias or switched(where)
    own = where.family.positions if biased and record_of(where) is None else "none"
    return str(next((bias for bias in found if bias is not None), own))


def record_of(where: Places | ImagePlaces) -> Record | None:
    data = getattr(where.model.config, "posenc", None)
    return None if data is None else Record.from_dict(data)


def check_model(model: Any) -> None:
    """Raise where the live model does not do what its config says, with every disagreement found."""
    model = bare(model)
    where = image_places(model) or places(model)
    record = record_of(where)
    if record is None and journal_of(model) is not None:
        faults = ["the model is patched, and its config has lost the 'posenc' record"]
    elif record is None:
        faults = rotary_faults(where, {}) if isinstance(where, Places) else []
    elif journal_of(model) is None:
        faults = [
            f"the config says that the model is patched with {record.scheme.name!r}, and no patch is in place; "
            "load the checkpoint with hf_posenc.load"
        ]
    elif isinstance(where, ImagePlaces):
        faults = image_faults(where, record)
    else:
        effects = record.effects()
        faults = rotary_faults(where, effects) + attention_faults(where, record, effects)
        faults += table_faults(where, next(iter(effects.values())))
    if record is not None and journal_of(model) is not None:
        faults += seal_faults(model)
    if faults:
        raise PosencError("The model and its config disagree: " + "; ".join(faults) + ".")
