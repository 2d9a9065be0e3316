"""Falcon: RoPE, or ALiBi where a switch in the config says so."""

from .base import Family, register_family

register_family(
    Family(
        name="falcon",
        model_types=("falcon",),
        positions="RoPE or ALiBi",
        rotary=True,
        switch=("alibi", "use_alibi"),
    )
)
