"""What a live model does with positions, read from its modules."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ..compat.models import attention_of
from ..compat.pytorch import usual_defaults
from ..engines.kinds import LISTED, keys_of, kind_of_rope
from ..engines.table import runtime_lines
from ..families import Group, Places, places
from ..families.places import sides
from ..runtime.rotary import SEALED, STILL
from ..schemes.plans import Plan
from ..schemes.temperature import NoTemperature
from .config_plans import rotates_nothing
from .grades import MEANING, grade
from .grades import SEALED as SEALED_GRADE
from .layer_plans import divide_places, layer_descriptions
from .measure import groups_of_types
from .own_temperature import own_temperature
from .patch_state import links, record_of, unwrap_model
from .records import Record, uses_layer_list
from .rotary_site import own_rope, rope_of, scaling_of
from .sizes import config_length
from .tables import table_words


@dataclass(frozen=True, kw_only=True)
class Description:
    """The answer of `describe`, to print or to read by its fields. A field is None where it does not apply."""

    model: str
    scheme: str
    options: dict[str, Any]

    plan: dict[str, str] | None = None
    """What each group of layers does, where a plan gives them different schemes."""
    layers: str | None = None
    """Which layers are patched or described, on a model with layers of several types."""
    trained_length: int | None = None
    target_length: int | None = None
    """How far positions reach, by the config."""
    factor: float | None = None
    rope_theta: float | None = None
    effective_theta: float | None = None
    """The theta of a plain RoPE whose slowest pair rotates as the live one does."""
    shortest_wavelength: float | None = None
    """Wavelengths are in tokens."""
    longest_wavelength: float | None = None
    pairs: int | None = None
    """How many rotary pairs rotate; 0 where the rotation is switched off."""
    pairs_below_one_turn: int | None = None
    """How many of them turn less than once within the trained length."""
    attention_scaling: float | None = None
    """The number that cos and sin are multiplied by. It scales scores by its square."""
    temperature: str | None = None
    """What queries are multiplied by, depending on their position; a temperature of the model's own is included."""

    image_size: tuple[int, ...] | None = None
    """Height and width of images in pixels, by the config of a vision model. A patched one takes other sizes too."""
    patch_size: tuple[int, ...] | None = None
    grid: tuple[int, ...] | None = None
    """Rows and columns of patches in such an image."""
    axes: str | None = None
    special_tokens: int | None = None
    """How many tokens, such as classes and registers, come before the patches. They have no coordinates."""
    rotation: str | None = None

    kernel: str
    table: str
    bias: str
    portability: str
    nearest: str | None = None
    """Where only hf_posenc can run the scheme: the most similar scheme that other runtimes know."""
    runtimes: dict[str, str] | None = None
    """What each runtime does with this model, as far as that is known (`hf_posenc.engines`)."""

    def __str__(self) -> str:
        values = {field.name.replace("_", " "): getattr(self, field.name) for field in fields(self)}
        values |= values.pop("runtimes") or {}
        lines = []
        for name, value in values.items():
            if value is None or value in ({}, ""):
                continue
            text = f"{value:.6g}" if isinstance(value, float) else str(value)
            if name == "plan":
                text = ("\n" + " " * 22).join(f"{layers}: {does}" for layers, does in value.items())
            lines.append(f"{name:<22}{text}")
        return "\n".join(lines)


@usual_defaults()
def describe(model: Any) -> Description:
    """Describe how the live model knows positions. Frequencies and scales are read from its modules."""
    model = unwrap_model(model)
    where, record = places(model), record_of(model)
    where = where if record is None else divide_places(where, record.scheme)
    group = _group(where, record)
    bias, tables = _bias(where, group, record), [table_words(stack) for stack in where.stacks]
    table = next((words for words in tables if words != "none"), "none")
    kind = where.model_config.model_type if where.family.part else where.config.model_type
    portability = _portability(where, record)
    return Description(
        model=f"{type(model).__name__} ({kind})",
        scheme=record.scheme.name if record else f"{own_positions(where, table, bias)} (the model's own)",
        options=record.scheme.options() if record and not isinstance(record.scheme, Plan) else {},
        plan=layer_descriptions(record.scheme, where) if record else None,
        kernel=attention_of(where.config),
        table=table,
        bias=bias,
        portability=portability,
        nearest=nearest_scheme(where, record) if portability.startswith(SEALED_GRADE) else None,
        runtimes=None
        if group.stack.grid
        else runtime_lines(*cell_of(where, portability.startswith(SEALED_GRADE), record)),
        **(_on_a_grid(group) if group.stack.grid else _in_a_text(where, group, record)),
    )


def _in_a_text(where: Places, group: Group, record: Record | None) -> dict[str, Any]:
    """The fields about positions on one axis."""
    inv_freq, scaling = live_rotation(group)
    if is_switched(where):
        inv_freq = torch.zeros(0)
    rotating = [f for f in inv_freq.tolist() if f > STILL]
    trained = record.geometry.trained_length if record else config_length(where)
    rope = rope_of(where.config, group.layer_type) if where.has_rotary else None
    return {
        "layers": ", ".join(record.geometries) if record else group.layer_type,
        "trained_length": trained,
        "target_length": config_length(where),
        "factor": record.scheme.span(record.geometry).factor if record else (rope or {}).get("factor"),
        "rope_theta": _theta(rope, record) if rotating else None,
        "effective_theta": effective_theta(rotating, len(inv_freq)),
        "shortest_wavelength": 2 * math.pi / max(rotating) if rotating else None,
        "longest_wavelength": 2 * math.pi / min(rotating) if rotating else None,
        "pairs": len(rotating),
        "pairs_below_one_turn": sum(f * (trained or 0) < 2 * math.pi for f in rotating),
        "attention_scaling": scaling,
        "temperature": _temperature(group, record),
    }


def _temperature(group: Group, record: Record | None) -> str | None:
    """What queries are multiplied by, by the patch or by the family's own code."""
    found = next((link.temperature for _, link in links(group.attentions) if link.temperature is not None), None)
    if found is not None:
        return str(found)
    temperature = None if record is None else record.scheme.part(group.name).temperature
    effect = None if temperature is None or record is None else record.effects()[group.name]
    if effect is not None and not effect.own_temperature and not isinstance(temperature, NoTemperature):
        return f"{record.scheme.part(group.name).options()['temperature']}, as a part of the attention scaling"  # type: ignore[union-attr]
    return own_temperature(group.stack, group.attentions)


def _on_a_grid(group: Group) -> dict[str, Any]:
    """The fields about positions on several axes."""
    stack = group.stack
    return {
        "image_size": sides(getattr(stack.config, stack.family.length)),
        "patch_size": stack.patch,
        "grid": stack.grid,
        "axes": ", ".join(stack.family.axes),
        "special_tokens": stack.special,
        "rotation": str(getattr(stack.root, "posenc_rotation", "none")),
    }


def _group(where: Places, record: Record | None) -> Group:
    """The layers to describe: the first patched group, or the layers that look furthest."""
    groups = {group.name: group for group in where.groups}
    if record is not None:
        return groups[next(iter(record.geometries))]
    return groups_of_types(where, None)[0]


def _portability(where: Places, record: Record | None) -> str:
    if record is None:
        return "unpatched"
    found = next(iter({grade(effect, where.family) for effect in record.effects().values()}))
    return f"{found}: {MEANING[found]}"


def nearest_scheme(where: Places, record: Record | None) -> str | None:
    """The scheme most similar to the model's that a config or weights can say."""
    if record is None:
        return None
    return record.scheme.nearest or ("yarn" if where.has_rotary else "learned" if where.has_table else None)


def cell_of(where: Places, sealed: bool, record: Record | None) -> tuple[str, str, set[str]]:
    """The model's place in the table of what runtimes compute: its type, its kind of positions and its keys."""
    rope = getattr(where.config, "rope_parameters", None)
    rope = rope if isinstance(rope, dict) else {}
    if sealed:
        kind = SEALED_GRADE
    elif uses_layer_list(record):
        kind = LISTED
    elif where.has_rotary:
        kind = kind_of_rope(rope)
    else:
        kind = "table" if where.has_table else "own"
    patch = {"posenc": {"scheme": record.scheme.name}} if record is not None else {}
    return where.config.model_type, kind, keys_of({**vars(where.config), **patch})


def _theta(rope: dict[str, Any] | None, record: Record | None) -> float | None:
    if rope is not None and rope.get("rope_type") != SEALED:
        return rope.get("rope_theta")
    return None if record is None else record.scheme.theta(record.geometry)


def own_positions(where: Places, table: str, bias: str) -> str:
    """The kind of positions that an unpatched model has."""
    if where.stacks[0].grid:  # the config says which of these there are
        return " and ".join(kind for kind, words in (("bias", bias), ("table", table)) if words != "none") or "none"
    if not where.has_rotary or is_switched(where):
        return where.family.positions
    kinds = {own_rope(group)["rope_type"] for group in where.groups if rope_of(where.config, group.layer_type)}
    return f"{'/'.join(sorted(kinds))} RoPE"


def is_switched(where: Places) -> bool:
    """Whether a switch in the config replaces the family's usual kind of positions by another one."""
    switch = where.family.switch
    return switch is not None and bool(getattr(where.config, switch[0]))


def effective_theta(rotating: list[float], pairs: int) -> float | None:
    if len(rotating) < 2:
        return None
    return float(min(rotating) ** (-pairs / (len(rotating) - 1)))


def live_rotation(group: Group) -> tuple[Tensor, float]:
    """The frequencies and the scale by which q and k are rotated now."""
    for _, link in links(group.attentions):
        if link.shared.rotation is not None:
            return link.shared.inv_freq.float().cpu(), link.shared.rotation.attention_scaling
    planned = getattr(group.stack.root, "posenc_rotary" + group.suffix, None) if group.suffix else None
    if planned is not None:
        buffer = group.stack.rotaries[0].buffers[group.layer_type]
        return getattr(planned.inner, buffer).float().cpu(), scaling_of(planned.inner, group.layer_type)
    if group.inv_freq is not None and rotates_nothing(group):
        return torch.zeros(len(group.inv_freq)), 1.0
    if group.inv_freq is not None:
        return group.inv_freq.float().cpu(), scaling_of(group.stack.rotaries[0].own, group.layer_type)
    return torch.zeros(0), 1.0


def _bias(where: Places, group: Group, record: Record | None) -> str:
    """The bias on attention scores, from the patch or from the family's own code."""
    if group.stack.biases and not group.stack.grid:
        return where.family.positions
    if group.stack.biases:
        return ", ".join(sorted({type(site.module).__name__ for site in group.stack.biases}))
    found = [link.bias for _, link in links(group.attentions)]
    own = where.family.positions if (where.has_bias or is_switched(where)) and record is None else "none"
    return str(next((bias for bias in found if bias is not None), own))
