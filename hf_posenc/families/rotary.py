"""Families with one rotary module for all layers, built from `config.rope_parameters`."""

from .base import Family, register

register(
    Family(
        name="rotary",
        model_types=("llama", "mistral", "qwen2", "qwen3"),
        layers="layers",
        self_attention="self_attn",
        rotary="rotary_emb",
    )
)
