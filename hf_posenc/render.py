"""From a scheme to the edits that it means on a live model, site by site.

Every site is set: what a scheme leaves out is neutralised, so that replacing never becomes stacking.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn

from . import attention as _attention  # noqa: F401  importing registers the attention functions
from .edits import Edit, Hook, Journal, Swap
from .families import Places
from .grades import is_sealed
from .positions import PREFIX, SEAL, Link, Positions, before_attention
from .records import Record
from .registry import PosencError
from .rotary import SEALED, UNTURNED, Rotary
from .schemes import Scheme
from .sidecar import before_state_dict
from .sites import Effect, Geometry, Rotation
from .tables import ZeroTable

LOST = (
    "this model was loaded from a patched checkpoint, which does not hold the position table that the model had "
    "before; load the original model instead"
)


def plan(
    where: Places, scheme: Scheme, geometry: Geometry, *, loaded: Record | None = None, lost: str | None = None
) -> Journal:
    """All edits that the scheme means on this model. Nothing is changed yet.

    `loaded`: the model has just been loaded from a checkpoint of itself patched, and its tables hold what that says.
    `lost`: why the model's own table is not at hand any more.
    """
    effect = scheme.effect(geometry)
    if lost is not None and effect.table is not None and effect.table.reads_native:
        raise PosencError(f"{scheme.name!r} starts from the model's own table: {lost}.")
    target = scheme.span(geometry).target
    sealed = is_sealed(effect, where.rotary is not None)
    config = where.config
    record = loaded or Record(scheme, geometry, original_of(where))
    edits: list[Edit] = [Swap(config, "max_position_embeddings", target)]
    edits += _table_edits(where, effect, 1 if sealed else target, loaded is not None)
    if where.rotary is not None:
        edits += _rotary_edits(where, effect, geometry, sealed, target)
    if sealed:
        edits += _attention_edits(where, effect)
    edits.append(Swap(config, "posenc", record.to_dict()))
    edits.append(Hook(where.model, before_state_dict, before="state dict"))
    journal = Journal(edits, final=LOST if loaded is not None and where.table is not None else lost)
    edits.append(Swap(where.base, "posenc_journal", journal))
    return journal


def original_of(where: Places) -> dict[str, Any]:
    """The config values that a patch replaces."""
    values = {"max_position_embeddings": where.config.max_position_embeddings}
    if where.rotary is not None:
        values["rope_parameters"] = copy.deepcopy(where.config.rope_parameters)
    return values


def _table_edits(where: Places, effect: Effect, rows: int, loaded: bool) -> list[Edit]:
    edits: list[Edit] = []
    if where.embeddings is not None:
        edits.append(Hook(where.embeddings, before_embeddings))
    native, source = where.table, effect.table
    if native is not None:
        like = native.weight
        if source is None:
            # In a sealed checkpoint the table has one row: of no use to whoever forces the seal, and refused.
            module: nn.Module = ZeroTable(native.embedding_dim, rows, like)
        else:
            module = source.restored(native, like) if loaded else source.module(native, like)
        path = (where.family.table or "").rpartition(".")
        edits.append(Swap(where.base.get_submodule(path[0]), path[2], module))
    elif source is not None:
        like = where.base.get_input_embeddings().weight
        edits.append(Swap(where.base, "posenc_table", source.module(None, like)))
        edits.append(Swap(where.layers[0], "posenc_link", Link(where.base)))
        edits.append(Hook(where.layers[0], before_first_layer))
    return edits


def before_first_layer(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Adds the vectors of the positions to the input, on families that have no table of their own."""
    added = layer.posenc_link.base.posenc_table(kwargs["position_ids"])
    return (args[0] + added.to(args[0].device), *args[1:]), kwargs


def before_embeddings(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Positions and token types made to measure, where the module would take them from buffers that end."""
    given = kwargs.get("input_ids")
    shape = given.shape if given is not None else kwargs["inputs_embeds"].shape[:2]
    device = (given if given is not None else kwargs["inputs_embeds"]).device
    if kwargs.get("position_ids") is None:
        past = kwargs.get("past_key_values_length", 0)
        kwargs["position_ids"] = (torch.arange(shape[1], device=device) + past)[None]
    if kwargs.get("token_type_ids") is None:
        kwargs["token_type_ids"] = torch.zeros(shape, dtype=torch.long, device=device)
    return args, kwargs


def _rotary_edits(where: Places, effect: Effect, geometry: Geometry, sealed: bool, target: int) -> list[Edit]:
    assert geometry.rope is not None
    theta = geometry.rope["rope_theta"]
    rotation = effect.rotation
    if sealed:
        parameters: dict[str, Any] = {"rope_type": SEALED, "rope_theta": theta}
        rotation = None
    elif rotation is None:
        parameters = {"rope_theta": theta, **UNTURNED}
    else:
        parameters = dict(rotation.parameters or {})
    module = _rebuilt(where, parameters, target, rotation)
    path = (where.family.rotary or "").rpartition(".")
    return [
        Swap(where.config, "rope_parameters", parameters),
        Swap(where.base.get_submodule(path[0]), path[2], module),
    ]


def rotary_class(where: Places) -> Any:
    """The family's own class of rotary module, also behind a patch."""
    return type(where.rotary.inner if isinstance(where.rotary, Rotary) else where.rotary)


def _rebuilt(where: Places, parameters: dict[str, Any], target: int, rotation: Rotation | None) -> Rotary:
    """The family's own rotary module made from the new parameters, as anyone who loads the config will make it."""
    config = copy.deepcopy(where.config)
    config.max_position_embeddings = target
    sealed = parameters["rope_type"] == SEALED
    config.rope_parameters = {**copy.deepcopy(parameters), **(UNTURNED if sealed else {})}
    inner = rotary_class(where)(config=config)
    inner.config = where.config
    pairs = len(where.rotary.inv_freq)
    wanted = torch.tensor(rotation.inv_freq if rotation else (0.0,) * pairs)
    scaling = rotation.attention_scaling if rotation else 1.0
    if inner.inv_freq.shape != wanted.shape or not torch.allclose(inner.inv_freq, wanted, rtol=1e-5, atol=0):
        raise PosencError(
            f"transformers computes other frequencies from {parameters} than this scheme means; this version of it "
            "is not supported."
        )
    if not math.isclose(inner.attention_scaling, scaling, rel_tol=1e-6):
        raise PosencError(f"transformers scales attention by {inner.attention_scaling}, this scheme by {scaling}.")
    # The frequencies are fixed: none of the types that look at the length in each pass is needed.
    inner.rope_type = "default"
    return Rotary(inner.to(where.rotary.inv_freq.device))


def _attention_edits(where: Places, effect: Effect) -> list[Edit]:
    config, base = where.config, where.base
    kernel = config._attn_implementation
    if kernel not in ("sdpa", "eager"):
        raise PosencError(
            f"This scheme works inside attention, through the 'sdpa' and 'eager' kernels; the model uses {kernel!r}. "
            "Call model.set_attn_implementation('sdpa') first."
        )
    rotation = effect.rotation if where.rotary is None or _follows(effect) else None
    edits: list[Edit] = [
        Swap(config, "_attn_implementation", PREFIX + kernel),
        Swap(config, "attn_implementation", SEAL),  # what config.json will say
        Swap(base, "posenc", Positions(rotation, base.get_input_embeddings().weight.device)),
    ]
    if effect.bias is not None:
        weight = base.get_input_embeddings().weight
        edits.append(Swap(base, "posenc_bias", effect.bias.to(device=weight.device, dtype=weight.dtype)))
    for attention in where.attentions:
        edits.append(Swap(attention, "posenc_link", Link(base, first=attention is where.attentions[0])))
        edits.append(Hook(attention, before_attention))
    edits += [Swap(cross, "posenc_link", Link(None)) for cross in where.crosses]
    return edits


def _follows(effect: Effect) -> bool:
    return effect.rotation is not None and effect.rotation.follows_length
