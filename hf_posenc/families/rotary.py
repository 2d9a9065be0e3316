"""RoPE, whatever the model is called: a module holds `inv_freq` and reads `config.rope_parameters`."""

from .base import Family, register_family

ROTARY = register_family(Family(name="rotary", positions="RoPE", rotary=True))
"""The family that serves every model in which such a module is found."""
