"""transformers: what a cache of keys and values tells of itself."""

from __future__ import annotations

from typing import Any

UNREGISTERED: dict[str, Any] = {"_layer_type": None, "layer_type": None}
"""Attributes of a subclass of a cache's layer that keep it out of transformers' own table of layers by type."""


def query_offset(cache: Any, layer: int) -> Any:
    """Where the next query of a layer stands: a number, or a tensor that only the device knows, of a static cache.

    Before transformers 5.14 that was how many tokens a layer had seen; since then it is a question of its own, as
    some caches run ahead of their model.
    """
    ask = getattr(cache, "get_query_offset", None)
    return cache.get_seq_length(layer) if ask is None else ask(layer)


def layer_at(cache: Any, layer: int) -> Any:
    """A layer of a cache. Caches that grow make theirs when they are first written to: here they are made to."""
    kind = getattr(cache, "layer_class_to_replicate", None)
    while kind is not None and len(cache.layers) <= layer:
        cache.layers.append(kind())
    return cache.layers[layer]


def clear_layer(layer: Any) -> None:
    """Drop all that a growing layer holds. Its own `reset` leaves zeros of the old length before transformers 5.18."""
    layer.keys, layer.values, layer.is_initialized = None, None, False
