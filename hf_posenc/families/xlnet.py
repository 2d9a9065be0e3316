"""Transformer-XL's kin: attention layers are told vectors of all distances, and multiply queries with them."""

from typing import Any

from torch import Tensor, zeros_like

from .base import Family, register_family


def zeros(given: Any) -> Any:
    """Zeros in the shape of what was given: a product with these adds nothing to a score."""
    if isinstance(given, Tensor):
        return zeros_like(given)
    return given if given is None else type(given)(map(zeros, given))


def without_distances(given: Any) -> Any:
    """What a Funnel layer is told, of which vectors of distances come first."""
    return (zeros(given[0]), *given[1:])


register_family(
    Family(
        name="xlnet",
        model_types=("xlnet",),
        positions="Transformer-XL terms",
        length="n_positions",  # its config has none: texts may be of any length
        bias="r",
        blank=zeros,
    )
)
register_family(
    Family(
        name="funnel",
        model_types=("funnel",),
        positions="Transformer-XL terms",
        length="n_positions",
        bias="attention_inputs",
        blank=without_distances,
    )
)
