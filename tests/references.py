"""What references by other means share: logits, and frequencies as transformers computes them."""

import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hf_posenc.core.effects import FollowingRotation, Geometry, Rotation


def logits(model: PreTrainedModel, ids: Tensor | None = None, **kwargs) -> Tensor:
    with torch.no_grad():
        return model(ids, **kwargs).logits


def transformers_rope(
    dim: int, trained: int, target: int | None = None, seq_len: int | None = None, theta: float = 10_000.0, **rope
) -> tuple[Tensor, float]:
    """inv_freq and attention factor as transformers computes them from a config."""
    rope.setdefault("rope_theta", theta)
    if rope["rope_type"] in ("yarn", "llama3", "longrope"):
        rope["original_max_position_embeddings"] = trained
    config = LlamaConfig(
        hidden_size=4 * dim,
        num_attention_heads=4,
        head_dim=dim,
        max_position_embeddings=target or trained,
        rope_parameters=rope,
    )
    if rope["rope_type"] == "default":
        return LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, seq_len=seq_len)


BETAS = dict(beta_fast=4.0, beta_slow=0.5)
"""A ramp that lies within the few pairs of a tiny head."""
BANDS = dict(low_freq_factor=0.5, high_freq_factor=4.0)
ROTATIONS = {
    "rope": (dict(rope_theta=500.0), dict(rope_type="default", rope_theta=500.0)),
    "linear": (dict(factor=4.0), dict(rope_type="linear", factor=4.0)),
    "ntk": (dict(factor=4.0), dict(rope_type="default", rope_theta=10_000 * 4 ** (16 / 14))),
    "yarn": (dict(factor=4.0, **BETAS), dict(rope_type="yarn", factor=4.0, **BETAS)),
    "llama3": (dict(factor=4.0, **BANDS), dict(rope_type="llama3", factor=4.0, **BANDS)),
    "proportional": (
        dict(partial_rotary_factor=0.5),
        dict(rope_type="proportional", partial_rotary_factor=0.5),
    ),
}


def geometry(dim: int, trained: int, theta: float = 10_000.0, rope: dict | None = None) -> Geometry:
    return Geometry(
        hidden_size=4 * dim,
        num_heads=4,
        head_dim=dim,
        rotary_dim=dim,
        trained_length=trained,
        causal=True,
        rope=rope or {"rope_type": "default", "rope_theta": theta},
    )


def at_length(following: Rotation, length: int) -> Tensor:
    """The frequencies of a query that sees `length` tokens, from the definition of a FollowingRotation."""
    assert isinstance(following, FollowingRotation)
    growth = following.growth(following.stage(torch.tensor(length)))
    return torch.tensor(following.inv_freq) * torch.exp(-growth * torch.tensor(following.weights))
