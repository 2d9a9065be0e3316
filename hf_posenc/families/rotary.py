"""RoPE, whatever the model is called: a module holds `inv_freq` and reads `config.rope_parameters`."""

from .base import Family, register_family

register_family(Family(name="rotary", positions="RoPE", rotary=True))
