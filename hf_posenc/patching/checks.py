"""Where a live model does not do what its config says."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from transformers import AttentionMaskInterface

from ..core.effects import Effect, OwnTable
from ..core.tables import ComputedTable, LearnedTable, ZeroTable
from ..families import Group, Places, Stack
from ..families.finding import frequency_buffers
from ..runtime.hooks import before_biased_layer, before_embeddings, before_first_layer
from ..runtime.positions import PREFIX, before_attention
from ..runtime.rotary import SEALED, STILL, Rotary, built, frequencies, scaling_of
from .grades import is_sealed
from .measure import own_rope
from .plan import rotates_inside, sealed_words, works_inside
from .records import Record

MOVING = ("dynamic", "longrope")
"""transformers' own types of RoPE whose frequencies change with each call."""


def rotary_faults(where: Places, effects: dict[str, Effect]) -> list[str]:
    """`effects`: by group of layers; empty on a model that is not patched."""
    faults: list[str] = []
    for stack in where.stacks:
        groups = {g.layer_type: g for g in where.groups() if g.stack is stack}
        sealed = any(is_sealed(effect, where.family) for effect in effects.values())
        for site in stack.rotaries:
            if effects and not isinstance(site.module, Rotary):
                faults.append("the rotary module of the patch was replaced")
            for layer_type in frequency_buffers(site.module):
                group = groups[layer_type]
                faults += _frequency_faults(group, site.module, effects.get(group.name), sealed)
    return list(dict.fromkeys(faults))


def _frequency_faults(group: Group, module: Any, effect: Effect | None, sealed: bool) -> list[str]:
    layer_type, kind = group.layer_type, own_rope(group)["rope_type"]
    prefix = f"{layer_type}_" if layer_type else ""
    moving = effect is None and kind in MOVING
    live = (getattr(module, f"{prefix}original_inv_freq") if moving else frequencies(module, layer_type)).float().cpu()
    rotation = effect.rotation if effect is not None else None
    if effect is not None and (rotation is None or rotation.follows_length):
        wanted = torch.zeros(len(live))
    else:
        wanted = live if rotation is None else torch.tensor(rotation.inv_freq)
    if not torch.allclose(live, wanted, rtol=1e-5, atol=STILL):
        return ["the rotation is not switched off" if sealed else "the live frequencies are not those of the scheme"]
    if sealed:  # such a config cannot be built anew by transformers; layers that are left alone are as they were
        marked = effect is None or kind == SEALED or not sealed_words(group.stack, [layer_type])
        return [] if marked else ["the config does not say that its rotation is sealed"]
    fresh = built(module, group.stack.config)
    half = frequencies(module, layer_type).dtype != torch.float32
    faults, new = [], frequencies(fresh, layer_type)
    if new.shape != live.shape or not torch.allclose(new, live, rtol=1e-2 if half else 1e-5, atol=STILL):
        faults.append(
            f"config.rope_parameters ({kind!r}) means other frequencies than the live rotary module has; a config "
            "edited after construction changes nothing, use patch_model"
        )
    meant, scaling = scaling_of(fresh, layer_type), scaling_of(module, layer_type)
    if not math.isclose(meant, scaling, rel_tol=1e-5):
        faults.append(f"the config means an attention scale of {meant:g}, the live module has {scaling:g}")
    return faults


def attention_faults(where: Places, record: Record, effects: dict[str, Effect]) -> list[str]:
    faults = []
    for stack in where.stacks:
        groups = [g for g in where.groups() if g.stack is stack and g.name in effects]
        inside = any(works_inside(effects[g.name], stack) for g in groups)
        name = stack.config._attn_implementation
        for layer in stack.biased:
            if before_biased_layer not in layer._forward_pre_hooks.values():
                faults.append(f"a {type(layer).__name__} has lost the hook that takes its own bias away")
        if not inside:
            faults += [f"the scheme needs no {name!r}"] if name.startswith(PREFIX) else []
            continue
        if not name.startswith(PREFIX):
            faults.append(f"the attention is {name!r}, which drops the scheme; set it to {PREFIX + 'sdpa'!r}")
        elif name not in AttentionMaskInterface._global_mapping:
            faults.append(f"no mask function is registered for {name!r}, so that padding would be seen")
        for group in groups:
            faults += _group_faults(group, effects[group.name], record)
    return faults


def _group_faults(group: Group, effect: Effect, record: Record) -> list[str]:
    unturned = record.geometries[group.name].unturned
    layers = [a for i, a in enumerate(group.attentions) if i not in unturned]
    hooked = [before_attention in a._forward_pre_hooks.values() for a in layers]
    if not all(hooked):
        return [f"{hooked.count(False)} of {len(hooked)} attention layers have lost their hook"]
    link = layers[0].posenc_link
    shared, bias = getattr(link.root, "posenc" + link.suffix, None), link.bias
    if shared is None:
        return ["the base model has lost its 'posenc' module"]
    faults, rotation = [], effect.rotation
    if rotates_inside(rotation, group.stack):
        assert rotation is not None
        live = shared.inv_freq.float().cpu()
        if shared.rotation != rotation or not torch.equal(live, torch.tensor(rotation.inv_freq)):
            faults.append("the live frequencies are not those of the scheme")
    if shared.pattern != effect.pattern or shared.forgets != effect.forgets:
        faults.append("the pattern of keys is not that of the scheme")
    if (effect.bias is None) != (bias is None):
        faults.append("the bias of the scheme is missing" if effect.bias else "there is a bias that the scheme lacks")
    elif effect.bias is not None and bias is not None:
        live_buffers = dict(bias.named_buffers())
        for key, wanted in effect.bias.named_buffers():
            if key in live_buffers and not torch.equal(live_buffers[key].cpu(), wanted):
                faults.append(f"{key} of the bias are not those of the scheme")
    return faults


def table_faults(where: Places, effect: Effect) -> list[str]:
    return [fault for stack in where.stacks for fault in _stack_table_faults(stack, effect)]


def _stack_table_faults(stack: Stack, effect: Effect) -> list[str]:
    if stack.table is None and isinstance(effect.table, OwnTable):
        return []
    faults, first = [], stack.first_layer
    if stack.embeddings is not None and before_embeddings not in stack.embeddings._forward_pre_hooks.values():
        faults.append("the embeddings have lost their hook")
    added = stack.table is None and effect.table is not None
    if added and first is not None and before_first_layer not in first._forward_pre_hooks.values():
        faults.append("the first layer has lost the hook that adds positions")
    own = stack.table.module if stack.table is not None else getattr(stack.root, "posenc_table", None)
    inner: Any = getattr(own, "original_module", own)  # peft keeps trained copies behind a wrapper
    if inner is None:
        return [*faults, "the position table of the scheme is missing"] if effect.table is not None else faults
    if not isinstance(inner, (ComputedTable, LearnedTable)):
        return [*faults, f"the position table is a {type(inner).__name__}, not the one that the patch put there"]
    wanted = _wanted_table(stack, effect, inner)
    if str(wanted) != str(inner) or not _same_buffers(wanted, inner):
        faults.append(f"the position table is {inner}, and the scheme means {wanted}")
    promise = getattr(stack.config, stack.family.length, None)
    rows = inner.offset if stack.family.counted else 0
    if isinstance(inner, LearnedTable) and inner.num_embeddings - inner.offset + rows != (promise or 0) > 0:
        faults.append(f"the table has {inner.num_embeddings} rows and the config promises {promise}")
    return faults


def _wanted_table(stack: Stack, effect: Effect, inner: Any) -> nn.Module:
    like = inner.weight if isinstance(inner, LearnedTable) else inner.anchor
    if effect.table is None:
        return ZeroTable(inner.size if isinstance(inner, ComputedTable) else inner.embedding_dim, None, like)
    if isinstance(inner, LearnedTable) and stack.table is not None:
        return effect.table.restored(inner, like)
    stand_in = nn.Embedding(1, inner.size, _weight=like.new_zeros(1, inner.size)) if stack.table is not None else None
    made: nn.Module = effect.table.restored(stand_in, like)
    return made


def _same_buffers(one: nn.Module, other: nn.Module) -> bool:
    theirs = dict(other.named_buffers())
    return all(torch.equal(buffer, theirs[name]) for name, buffer in one.named_buffers())
