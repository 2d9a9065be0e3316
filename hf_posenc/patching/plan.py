"""From a scheme to the edits that it means on a live model, site by site.

Every site is set: what a scheme leaves out is neutralised, so that replacing never becomes stacking.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..core.effects import Effect, OwnTable, Rotation, Span
from ..core.tables import Notes, Seated, ZeroTable
from ..errors import PosencError, UnsupportedCell
from ..families import Group, Places, Stack
from ..families.base import NO_TABLE, UNTOLD
from ..families.finding import argument_names, attention_layers, frequency_buffers
from ..runtime import attention as _attention  # noqa: F401  importing registers the attention functions
from ..runtime.hooks import before_biased_layer, before_embeddings, before_first_layer
from ..runtime.positions import PREFIX, Link, Positions, before_attention
from ..runtime.rotary import (
    SEALED,
    STILL,
    UNROTATED,
    Rotary,
    built,
    carried_over,
    fixed,
    frequencies,
    hushed,
    retuned,
    scaling_of,
)
from ..schemes import Scheme
from ..schemes.rotary import factor_list
from .edits import Edit, Hook, Journal, Swap
from .grades import is_sealed, refuse_lost_bias
from .measure import Geometries, rope_of, skipped_rows
from .records import Record
from .seal import seal_edits
from .sidecar import before_state_dict

LOST = (
    "this model was loaded from a patched checkpoint, which does not hold the position table that the model had "
    "before; load the original model instead"
)

Effects = dict[str, Effect]
"""By group of layers."""
Words = dict[str, dict[str, Any]]
"""Rope parameters by type of layer; "" where all share one set."""


def plan(
    where: Places, scheme: Scheme, geometries: Geometries, *, loaded: Record | None = None, lost: str | None = None
) -> Journal:
    """All edits that the scheme means on this model. Nothing is changed yet.

    `loaded`: the model has just been loaded from a checkpoint of itself patched, and its tables hold what that says.
    `lost`: why the model's own table is not at hand any more.
    """
    effects = {name: scheme.effect(geometry) for name, geometry in geometries.items()}
    first = next(iter(geometries))
    source = effects[first].table
    if lost is not None and source is not None and source.reads_native:
        raise PosencError(f"{scheme.name!r} starts from the model's own table: {lost}.")
    reach = scheme.span(geometries[first])
    target = reach.target
    sealed = any(is_sealed(effect, where.family) for effect in effects.values())
    config = where.config
    record = loaded or Record(scheme, geometries, original_of(where))
    edits: list[Edit] = []
    if hasattr(config, where.family.length):
        edits.append(Swap(config, where.family.length, target + skipped_rows(where)))
    if where.family.switch:
        edits.append(Swap(config, where.family.switch[0], False))
        edits += [Swap(stack.root, where.family.switch[1], False) for stack in where.stacks]
    for stack in where.stacks:
        groups = [group for group in where.groups() if group.stack is stack and group.name in effects]
        if groups:
            edits += _table_edits(stack, effects[groups[0].name], target, sealed, loaded is not None)
            if stack.rotaries:
                words = rotary_words(stack, groups, effects, geometries, reach)
                edits += _rotary_edits(stack, groups, effects, words, sealed)
            edits += _inner_edits(stack, groups, effects, geometries)
    if sealed:
        edits += seal_edits(where.model, where.stacks[0].root.get_input_embeddings().weight)
        edits += _strangers(where)
    edits.append(Swap(where.model.config, "posenc", record.to_dict()))
    edits.append(Hook(where.model, before_state_dict, before="state dict"))
    journal = Journal(edits, final=LOST if loaded is not None and where.has_table else lost)
    edits.append(Swap(where.base, "posenc_journal", journal))
    return journal


def _strangers(where: Places) -> list[Edit]:
    """Attention layers that belong to no stack but share its config, such as those of a speech encoder."""
    known = {id(a) for stack in where.stacks for a in (*stack.attentions, *stack.crosses)}
    own, crosses = attention_layers(where.base, where.config.model_type)
    return [Swap(layer, "posenc_link", Link(None)) for layer in (*own, *crosses) if id(layer) not in known]


def _inner_edits(stack: Stack, groups: list[Group], effects: Effects, geometries: Geometries) -> list[Edit]:
    """What attention layers themselves must do, or leave."""
    edits: list[Edit] = []
    if stack.family.bias:
        edits += [Hook(layer, before_biased_layer) for layer in stack.biased]
        edits += [Swap(layer, "posenc_family", stack.family) for layer in stack.biased]
    if any(works_inside(effects[group.name], stack) for group in groups):
        edits += _attention_edits(stack, groups, effects, geometries)
    return edits


def works_inside(effect: Effect, stack: Stack) -> bool:
    """Whether attention layers must do what they do not do by themselves, or leave what they do."""
    rotation = effect.rotation
    added = effect.bias is not None or effect.pattern is not None
    return added or rotates_inside(rotation, stack) or bool(stack.family.bias and stack.attentions)


def rotates_inside(rotation: Rotation | None, stack: Stack) -> bool:
    """Whether q and k are rotated by us, not by the model's own rotary module."""
    return rotation is not None and (rotation.follows_length or not stack.rotaries)


def original_of(where: Places) -> dict[str, Any]:
    """The config values that a patch replaces."""
    values = {}
    if hasattr(where.config, where.family.length):
        values[where.family.length] = getattr(where.config, where.family.length)
    if getattr(where.config, "rope_parameters", None):
        values["rope_parameters"] = copy.deepcopy(where.config.rope_parameters)
    if where.family.switch:
        values[where.family.switch[0]] = getattr(where.config, where.family.switch[0])
    return values


def _table_edits(stack: Stack, effect: Effect, rows: int, sealed: bool, loaded: bool) -> list[Edit]:
    edits: list[Edit] = []
    if stack.embeddings is not None:
        makes = stack.family.makes_positions
        edits.append(Hook(stack.embeddings, before_embeddings))
        edits.append(Swap(stack.embeddings, "posenc_offset", None if makes else stack.family.offset(stack.config)))
    site, source = stack.table, effect.table
    if site is not None:
        native, offset = site.module, stack.family.offset(stack.config)
        like = native.weight
        if source is None:
            # In a sealed checkpoint the table has one row: of no use to whoever forces the seal, and refused.
            module: Seated = ZeroTable(native.embedding_dim, 1 if sealed else rows, like)
        else:
            inner = positions_only(native, offset, native.num_embeddings - (sealed and loaded))
            if isinstance(source, OwnTable) and rows > inner.num_embeddings:
                raise UnsupportedCell(
                    f"This scheme keeps the model's own position table, which ends at {inner.num_embeddings}; a "
                    f"target of {rows} needs another. Leave target_length out, or resize the table with 'learned'."
                )
            module = source.restored(inner, like) if loaded else source.module(inner, like)
            module.sealed = sealed
        module.take_seat_of(native, offset)
        if effect.rotation is not None and effect.rotation.follows_length:
            module.notes = Notes()
        edits.append(Swap(site.owner, site.name, module))
    elif source is not None and not isinstance(source, OwnTable):
        first, kind = stack.first_layer, stack.config.model_type
        reason = NO_TABLE.get(kind, UNTOLD if stack.family.bias else None)
        if reason is not None:
            raise UnsupportedCell(f"This scheme cannot add to the input of {kind!r} models: {reason}.")
        if first is None:
            raise UnsupportedCell(
                f"This scheme adds to the input of the first layer, and this {kind!r} model has no list of as many "
                "layers as its config says, to find it in."
            )
        like = stack.root.get_input_embeddings().weight
        edits.append(Swap(stack.root, "posenc_table", source.module(None, like)))
        edits.append(Swap(first, "posenc_link", Link(stack.root)))
        edits.append(Hook(first, before_first_layer))
    return edits


def positions_only(native: nn.Embedding, first: int, last: int) -> nn.Embedding:
    """A family's table without the rows that are no positions."""
    weight = native.weight.detach()[first:last]
    return native if len(weight) == len(native.weight) else nn.Embedding(len(weight), weight.shape[1], _weight=weight)


def _rotary_edits(stack: Stack, groups: list[Group], effects: Effects, words: list[Words], sealed: bool) -> list[Edit]:
    """`words`: ways to say the rotation in the config, the plainest first."""
    rotations = {group.layer_type: effects[group.name].rotation for group in groups}
    if sealed:
        _refuse_unreached(stack, groups, effects)
        native = {t: None if r is None or r.follows_length else r for t, r in rotations.items()}
        chosen = sealed_words(stack, rotations)
        modules = [retuned(site.module, native) for site in stack.rotaries]
    else:
        chosen, modules = _rebuilt(stack, rotations, words)
    edits: list[Edit] = [Swap(stack.config, "rope_parameters", _with(stack.config.rope_parameters, chosen))]
    for site, module in zip(stack.rotaries, modules, strict=True):
        device = next(iter(site.module.buffers())).device
        edits.append(Swap(site.owner, site.name, Rotary(module.to(device), tells=sealed)))
    return edits


def sealed_words(stack: Stack, layer_types: Iterable[str]) -> Words:
    """Rope parameters that nobody can build. Phi's configs take none that they do not know; theirs stay as they were.

    The other marks of a seal are enough: these are for who forces his way past all of them.
    """
    words: Words = {t: {**_kept(stack, t), "rope_type": SEALED} for t in layer_types}
    return {} if isinstance(_config_with(stack, words), str) else words


def rotary_words(
    stack: Stack, groups: list[Group], effects: Effects, geometries: Geometries, reach: Span
) -> list[Words]:
    """Ways to say what the groups' rotations are in `rope_parameters`, the plainest first.

    The last one, a factor for each pair, fits models that know no other type but `longrope`.
    """
    ways: list[Words] = [{}, {}, {}]
    for group in groups:
        rotation, geometry, kept = effects[group.name].rotation, geometries[group.name], _kept(stack, group.layer_type)
        if rotation is None:
            said: list[Mapping[str, Any]] = list(UNROTATED)
            pairs: Sequence[float] = (1e-30,) * (geometry.rotary_dim // 2)
            scaling = 1.0
        else:
            said = [rotation.parameters or {}] * 2
            pairs, scaling = rotation.inv_freq, rotation.attention_scaling
        if min(pairs) > 0:
            original = getattr(stack.config, "original_max_position_embeddings", None)  # which Phi's config insists on
            own = {"original_max_position_embeddings": original} if original else {}
            said.append({**factor_list(geometry, pairs, scaling, reach), **own, **pinned(kept)})
        for way, words in zip(ways, said, strict=False):
            if all(words.get(key, value) == value for key, value in pinned(kept).items()):
                way[group.layer_type] = {**kept, **words}
    return [way for way in ways if len(way) == len(groups)]


def _refuse_unreached(stack: Stack, groups: list[Group], effects: Effects) -> None:
    """Layers that rotate their input by themselves would lose their positions where a bias takes their place."""
    taken = [effects[group.name].rotation for group in groups if works_inside(effects[group.name], stack)]
    if not stack.unreached or not any(rotation is None or rotation.follows_length for rotation in taken):
        return
    names = sorted({type(module).__name__ for module in stack.unreached})
    raise UnsupportedCell(
        f"This scheme takes rotation away and works inside attention, and {', '.join(names)} of this "
        f"{stack.config.model_type!r} model rotates its input by itself, out of reach. Schemes that rescale RoPE "
        "('ntk', 'yarn', 'linear') work."
    )


def pinned(kept: Mapping[str, Any]) -> dict[str, Any]:
    """What of the rope parameters that stay must stay as it is, since something else reads it too."""
    return {k: v for k, v in kept.items() if k == "original_max_position_embeddings"}


def _kept(stack: Stack, layer_type: str) -> dict[str, Any]:
    rope = rope_of(stack.config, layer_type)
    return {"rope_theta": rope["rope_theta"], **carried_over(rope)}


def _with(rope: dict[str, Any], words: Words) -> dict[str, Any]:
    """A model's rope parameters with new ones for some types of layers."""
    return words[""] if "" in words else {**copy.deepcopy(rope), **words}


def _rebuilt(stack: Stack, rotations: Mapping[str, Rotation | None], ways: list[Words]) -> tuple[Words, list[Any]]:
    """The family's own rotary modules made from the new parameters, as anyone who loads the config will make them."""
    reasons = []
    for words in ways:
        config = _config_with(stack, words)
        if isinstance(config, str):
            reasons.append(config)
            continue
        try:
            modules = [built(site.module, config) for site in stack.rotaries]
        except (KeyError, TypeError, ValueError) as error:
            reasons.append(f"{type(error).__name__}: {error}")
            continue
        faults = [_fault(site.module, new, rotations) for site, new in zip(stack.rotaries, modules, strict=True)]
        if not any(faults):
            for module in modules:
                fixed(module, rotations)
            return words, modules
        reasons += filter(None, faults)
    raise UnsupportedCell(
        f"This scheme cannot be said in the config of a {stack.config.model_type!r} model: {reasons[0]}."
    )


def _config_with(stack: Stack, words: Words) -> Any:
    """A copy of the config with other rope parameters, or why it does not take them."""
    config = copy.deepcopy(stack.config)
    config.rope_parameters = copy.deepcopy(_with(stack.config.rope_parameters, words))
    try:
        with hushed():
            config.validate()
    except Exception as error:  # every model's config has its own ways to refuse
        return str(error.__cause__ or error).splitlines()[0]
    return config


def _fault(live: Any, new: Any, rotations: Mapping[str, Rotation | None]) -> str:
    """Why a rebuilt rotary module is not what was meant; empty if it is."""
    for layer_type in frequency_buffers(new):
        meant, scaling = frequencies(live, layer_type).float().cpu(), scaling_of(live, layer_type)
        if layer_type in rotations:
            rotation = rotations[layer_type]
            meant = torch.tensor(rotation.inv_freq) if rotation else torch.zeros(len(meant))
            scaling = rotation.attention_scaling if rotation else 1.0
        found = frequencies(new, layer_type).float().cpu()
        if found.shape != meant.shape or not torch.allclose(found, meant, rtol=1e-5, atol=STILL):
            return f"{type(new).__name__} computes other frequencies from it"
        if not math.isclose(scaling_of(new, layer_type), scaling, rel_tol=1e-6):
            return f"{type(new).__name__} scales attention by {scaling_of(new, layer_type):g}, not by {scaling:g}"
    return ""


def _attention_edits(stack: Stack, groups: list[Group], effects: Effects, geometries: Geometries) -> list[Edit]:
    config, root = stack.config, stack.root
    for group in groups:
        refuse_lost_bias(effects[group.name], stack.family)
    if not stack.attentions:
        raise UnsupportedCell(
            f"This scheme works inside attention, and {config.model_type!r} computes its scores by itself instead of "
            "through transformers' attention interface, where they could be changed without copying its code. "
            "Schemes that change the position table or rescale RoPE work, where the model has one."
        )
    kernel = config._attn_implementation
    if kernel not in ("sdpa", "eager"):
        raise PosencError(
            f"This scheme works inside attention, through the 'sdpa' and 'eager' kernels; the model uses {kernel!r}. "
            "Call model.set_attn_implementation('sdpa') first."
        )
    if any(effects[group.name].forgets for group in groups):
        _refuse_to_forget(stack, groups, geometries)
    edits: list[Edit] = [Swap(config, "_attn_implementation", PREFIX + kernel)]
    linked: set[int] = set()
    for group in groups:
        effect, geometry = effects[group.name], geometries[group.name]
        suffix = f"_{group.layer_type}" if len(groups) > 1 else ""
        weight = root.get_input_embeddings().weight
        rotation = effect.rotation if rotates_inside(effect.rotation, stack) else None
        shared = Positions(rotation, weight.device, geometry.layout, effect.pattern, effect.forgets)
        edits.append(Swap(root, "posenc" + suffix, shared))
        if effect.bias is not None:
            edits.append(Swap(root, "posenc_bias" + suffix, effect.bias.to(device=weight.device, dtype=weight.dtype)))
        layers = [a for i, a in enumerate(group.attentions) if i not in geometry.unturned]
        if not layers:
            raise UnsupportedCell(
                f"This scheme works inside attention, and no layer of this {config.model_type!r} model is of the kind "
                f"{group.layer_type!r} that its rope parameters name."
            )
        for attention in layers:
            link = Link(root, suffix, attention, attention is layers[0], stack.family.table)
            edits += [Swap(attention, "posenc_link", link), Hook(attention, before_attention)]
            linked.add(id(attention))
    others = [a for a in (*stack.attentions, *stack.crosses) if id(a) not in linked]
    return edits + [Swap(other, "posenc_link", Link(None)) for other in others]


def _refuse_to_forget(stack: Stack, groups: list[Group], geometries: Geometries) -> None:
    """A cache that drops keys must drop the same ones in all layers, once a pass."""
    patched = {id(a) for group in groups for a in group.attentions}
    types = getattr(stack.config, "layer_types", None) or [""] * len(stack.attentions)
    sliding = getattr(stack.config, "sliding_window", None) or any("sliding" in name for name in types)
    if sliding or any(geometries[group.name].unturned for group in groups) or len(patched) < len(stack.attentions):
        raise UnsupportedCell(
            f"This scheme drops the same keys in every layer, and some layers of this {stack.config.model_type!r} "
            "model are of another kind: they have a sliding window of their own (config.sliding_window), or no "
            "positions."
        )
    if any({"layer_idx", "cycle_offset"} & set(argument_names(a)) for a in stack.attentions):
        raise UnsupportedCell("This scheme drops keys once a pass, and this model runs its layers more than once.")
