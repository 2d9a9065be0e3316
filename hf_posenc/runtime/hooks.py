"""Forward pre-hooks of modules of a patched model. Each finds what it needs as attributes of its module."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import PosencError
from ..families.base import STATES_FIRST
from ..families.places import argument_names
from .positions import named_arguments, positions_in


def before_layers(root: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Finds which layer is the first now. Raises where that layer has no table of positions before it.

    Layers are told apart by their links: a wrapper (FSDP, recomputation, torch.compile) has the link of the layer
    inside, and a copy of a layer has its own.
    """
    first = root.get_submodule(root.posenc_layers)[0]
    link = getattr(first, "posenc_link", None)
    if link is None:
        raise PosencError(
            "This model adds positions to the input of its first layer, and another layer has come to be the first. "
            "Call unpatch_model before layers are changed, and patch_model after it."
        )
    if link.root.posenc_first is not link:  # a copy has taken the place of the first layer
        link.root.posenc_first = link


def before_first_layer(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Adds the vectors of a table to the input of the first layer, on families that have no table of their own."""
    link = layer.posenc_link
    if link.root.posenc_first is not link:  # a copy of the first layer, further up
        return None
    given, name = named_arguments(layer, args, kwargs), argument_names(layer)[0]
    states, positions = given[name], positions_in(given)
    if positions is None:
        raise PosencError(
            f"{type(layer).__name__} was called without position_ids, which the table before it needs. Call the "
            "model, or pass position_ids."
        )
    added = link.root.posenc_table(positions).to(states.device)
    if states.ndim > added.ndim and link.root.config.model_type not in STATES_FIRST:
        added = added.unsqueeze(-2)  # the layer has several states for each token
    return (), {**given, name: states + added}


def before_embeddings(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Passes position ids and token types to embeddings that would take them from buffers of a fixed length."""
    kwargs = named_arguments(module, args, kwargs)
    given = kwargs.get("input_ids")
    shape = given.shape if given is not None else kwargs["inputs_embeds"].shape[:2]
    device = (given if given is not None else kwargs["inputs_embeds"]).device
    names = argument_names(module)
    if kwargs.get("position_ids") is None and module.posenc_offset is not None:
        past = kwargs.get("past_key_values_length", 0)
        kwargs["position_ids"] = (torch.arange(shape[1], device=device) + past + module.posenc_offset)[None]
    if kwargs.get("token_type_ids") is None and "token_type_ids" in names:
        kwargs["token_type_ids"] = torch.zeros(shape, dtype=torch.long, device=device)
    return (), kwargs


def before_biased_layer(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Replaces the family's own position bias by a blank one."""
    kwargs = named_arguments(module, args, kwargs)
    family = module.posenc_family
    kwargs[family.bias] = family.blank(kwargs.get(family.bias))
    return (), kwargs
