"""Models with attention between Mamba layers, which has no positions of its own unless the config asks for RoPE."""

from .base import Family, register_family

register_family(
    Family(
        name="nope",
        model_types=("granitemoehybrid", "jamba", "kimi_linear", "nemotron_h", "zamba", "zamba2"),
        positions="none",
    )
)
