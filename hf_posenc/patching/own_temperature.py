"""Temperatures that families apply in their own code: what they are, and how a patch takes them away.

A model never applies its own temperature together with one from a patch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..core.effects import Effect
from ..errors import UnsupportedCell
from ..families import Group, Stack
from ..families.places import argument_names
from ..schemes.temperature_effect import BETA
from .edits import Edit, Swap

TUNING = "attn_temperature_tuning"
"""The switch in Llama 4's config, and in its attention layers, which keep a copy."""
READ_BETA = ("ministral3", "mistral4")
"""Model types whose attention reads a temperature from `rope_parameters`."""
ARGUMENT = "attention_scaling"
"""The argument by which a model gives its layers a temperature that a patch cannot take away (Beam)."""


def own_temperature(stack: Stack, layers: Sequence[Any] | None = None) -> str | None:
    """The temperature that a stack, or some of its layers, applies by itself, in words; None for none."""
    config = stack.config
    if _is_told_a_scaling(stack):
        return f"the model's own ({config.model_type}), in layers without RoPE"
    if getattr(config, TUNING, None) and any(getattr(a, TUNING, None) for a in layers or stack.attentions):
        told = f"1 + {config.attn_scale:g} ln(1 + floor(n / {config.floor_scale:g}))"
        return f"llama4, the model's own: {told}, in layers without RoPE"
    rope = getattr(config, "rope_parameters", None) or {}
    if config.model_type in READ_BETA and rope.get(BETA):
        length = rope.get("original_max_position_embeddings")
        return f"ministral, the model's own: 1 + {rope[BETA]:g} ln(1 + floor(position / {length}))"
    return None


def _is_told_a_scaling(stack: Stack) -> bool:
    return any(ARGUMENT in argument_names(attention) for attention in stack.attentions)


def can_differ(stack: Stack) -> bool:
    """Whether some layers of a stack can lose their own temperature while others keep it."""
    return any(hasattr(layer, TUNING) for layer in stack.attentions)


def own_temperature_edits(stack: Stack, groups: Iterable[Group], effects: Mapping[str, Effect]) -> list[Edit]:
    """Turns off a temperature that the config switches on. Those in `rope_parameters`: see `parameters_with_beta`."""
    replaced = _layers_to_change(groups, effects)
    if not replaced:
        return []
    if _is_told_a_scaling(stack):
        raise UnsupportedCell(
            f"This {stack.config.model_type!r} model has a temperature of its own, which cannot be taken away, and "
            "another one beside it was asked for. Leave temperature= out: the model's own stays in force."
        )
    if not hasattr(stack.config, TUNING):
        return []
    layers = [attention for attention in replaced if hasattr(attention, TUNING)]
    whole = [stack.config] if len(replaced) == len(stack.attentions) else []
    return [Swap(holder, TUNING, False) for holder in (*whole, *layers)]


def _layers_to_change(groups: Iterable[Group], effects: Mapping[str, Effect]) -> list[Any]:
    """The layers that are to lose their own temperature."""
    return [layer for g in groups if effects[g.name].own_temperature is not None for layer in g.attentions]


def parameters_with_beta(
    new: dict[str, dict[str, Any]], groups: Iterable[Group], effects: dict[str, Effect]
) -> dict[str, dict[str, Any]]:
    """Rope parameters by type of layer, with the beta of the temperature that the effects mean."""
    meant = {group.layer_type: effects[group.name].own_temperature for group in groups}
    return {
        kind: {**rope, BETA: meant[kind]} if BETA in rope and meant.get(kind) is not None else rope
        for kind, rope in new.items()
    }


def own_temperature_faults(stack: Stack, groups: Sequence[Group], effects: Mapping[str, Effect]) -> list[str]:
    """Where the family's own temperature is not as the patch left it."""
    meant = {effects[group.name].own_temperature for group in groups}
    replaced = _layers_to_change(groups, effects)
    live = own_temperature(stack, replaced) if replaced and meant <= {0.0, None} else None
    if live is not None:
        return [f"the model's own temperature is back ({live})"]
    rope = getattr(stack.config, "rope_parameters", None) or {}
    if meant - {None} and BETA in rope and rope[BETA] not in meant:
        return [f"config.rope_parameters has {BETA}={rope[BETA]}, which is not what the scheme means"]
    return []
