"""transformers: caches of keys and values, and their layers."""

from __future__ import annotations

from typing import Any

UNREGISTERED: dict[str, Any] = {"_layer_type": None, "layer_type": None}
"""Class attributes that keep a subclass of a cache layer out of transformers' table of layer types."""


def query_offset(cache: Any, layer: int) -> Any:
    """The position of a layer's next query: a number, or for a static cache a tensor on its device.

    Before transformers 5.14 this was the number of tokens that the layer had seen. Since then caches have a method for
    it, as some caches run ahead of their model.
    """
    ask = getattr(cache, "get_query_offset", None)
    return cache.get_seq_length(layer) if ask is None else ask(layer)


def layer_at(cache: Any, layer: int) -> Any:
    """A layer of a cache. Dynamic caches create layers on the first write; a missing one is created here."""
    kind = getattr(cache, "layer_class_to_replicate", None)
    while kind is not None and len(cache.layers) <= layer:
        cache.layers.append(kind())
    return cache.layers[layer]


def clear_layer(layer: Any) -> None:
    """Empty a dynamic layer. Before transformers 5.18 its own `reset` leaves zeros of the old length."""
    layer.keys, layer.values, layer.is_initialized = None, None, False
