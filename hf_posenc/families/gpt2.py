"""GPT-2."""

from .base import Family, register

register(
    Family(
        name="gpt2",
        model_types=("gpt2",),
        layers="h",
        self_attention="attn",
        cross_attention="crossattention",
        table="wpe",
    )
)
