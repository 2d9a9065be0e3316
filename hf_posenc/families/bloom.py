"""BLOOM and MPT: ALiBi, as an argument of attention layers that compute their scores by themselves."""

from typing import Any

from torch import zeros_like

from .base import Family, register_family


def zeros(value: Any) -> Any:
    return zeros_like(value)


register_family(
    Family(name="bloom", model_types=("bloom",), positions="ALiBi", length="seq_length", bias="alibi", blank=zeros)
)
register_family(
    Family(name="mpt", model_types=("mpt",), positions="ALiBi", length="max_seq_len", bias="position_bias")
)
