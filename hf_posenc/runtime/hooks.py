"""What runs before some modules of a patched model: each finds what it needs on the module itself."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import PosencError
from ..families.base import STATES_FIRST
from ..families.places import argument_names
from .positions import named_arguments, positions_in


def before_layers(root: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises where another layer has come to be the first, and so nothing would add positions to the input."""
    if getattr(_first_layer(root), "posenc_link", None) is None:
        raise PosencError(
            "This model adds positions to the input of its first layer, and another layer has come to be the first. "
            "Call unpatch_model before layers are changed, and patch_model after it."
        )


def _first_layer(root: Any) -> Any:
    return root.get_submodule(root.posenc_layers)[0]


def before_first_layer(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Adds the vectors of the positions to the input, on families that have no table of their own."""
    if _first_layer(layer.posenc_link.root) is not layer:  # a copy of the first, further up
        return None
    given, name = named_arguments(layer, args, kwargs), argument_names(layer)[0]
    states, positions = given[name], positions_in(given)
    if positions is None:
        raise PosencError(f"{type(layer).__name__} is not told positions, and a table of them was put before it.")
    added = layer.posenc_link.root.posenc_table(positions).to(states.device)
    if states.ndim > added.ndim and layer.posenc_link.root.config.model_type not in STATES_FIRST:
        added = added.unsqueeze(-2)  # several states for each token
    return (), {**given, name: states + added}


def before_embeddings(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Positions and token types made to measure, where the module would take them from buffers that end."""
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
    """Takes the family's own position bias away from an attention layer."""
    kwargs = named_arguments(module, args, kwargs)
    family = module.posenc_family
    kwargs[family.bias] = family.blank(kwargs.get(family.bias))
    return (), kwargs
