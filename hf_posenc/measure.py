"""The geometry of a live model."""

from __future__ import annotations

import copy
import warnings
from typing import Any

from .families import Places
from .registry import PosencError, UnsupportedModel
from .schemes import Scheme
from .sites import Geometry


def measure(where: Places, scheme: Scheme, existing: str | None) -> Geometry:
    """The geometry that a scheme starts from, with the user's corrections."""
    config, rope, trained = where.config, None, where.config.max_position_embeddings
    head = _head_dim(where)
    rotary_dim = head
    if where.rotary is not None:
        rope = own_rope(where)
        rotary_dim = 2 * len(where.rotary.inv_freq)
        if rope["rope_type"] != "default" and scheme.rescales:
            rope, trained = _on_scaled(rope, trained, existing, scheme)
    return Geometry(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        head_dim=head,
        rotary_dim=rotary_dim,
        trained_length=scheme.trained_length or trained,
        causal=bool(where.attentions[0].is_causal) and bool(getattr(config, "is_causal", True)),
        initializer_range=float(getattr(config, "initializer_range", 0.02)),
        rope=rope,
    )


def _head_dim(where: Places) -> int:
    for name in ("head_dim", "attention_head_size"):
        if getattr(where.attentions[0], name, None):
            return int(getattr(where.attentions[0], name))
    return int(where.config.hidden_size // where.config.num_attention_heads)


def own_rope(where: Places) -> dict[str, Any]:
    rope = getattr(where.config, "rope_parameters", None)
    if not isinstance(rope, dict) or not isinstance(rope.get("rope_theta"), (int, float)):
        raise UnsupportedModel(
            f"config.rope_parameters of this {where.config.model_type!r} model should be one flat set with a "
            f"rope_theta, and is {rope!r}."
        )
    return {"rope_type": "default", **copy.deepcopy(rope)}


def _on_scaled(rope: dict[str, Any], trained: int, existing: str | None, scheme: Scheme) -> tuple[dict[str, Any], int]:
    """What to start from on a model whose RoPE is scaled already."""
    kind, original = rope["rope_type"], rope.get("original_max_position_embeddings")
    if existing is None:
        warnings.warn(
            f"This model's RoPE is scaled already ({kind!r}, factor {rope.get('factor')}): {scheme.name!r} extends it "
            f"from {trained} tokens. Pass existing='extend' to say that this is meant, or existing='replace' to drop "
            "the old scaling first.",
            stacklevel=4,
        )
    if existing != "replace":
        return rope, trained
    if kind == "dynamic":
        original = trained
    if original is None and scheme.trained_length is None:
        raise PosencError(
            f"The config does not say at which length this model was trained before its {kind!r} scaling: "
            "existing='replace' needs trained_length=."
        )
    return {"rope_type": "default", "rope_theta": rope["rope_theta"]}, original or trained
