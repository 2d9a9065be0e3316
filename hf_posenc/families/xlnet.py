"""XLNet and Funnel: attention layers take vectors of all distances, and multiply queries with them."""

from typing import Any

from torch import Tensor, zeros_like

from .base import Family, register_family


def zeros(value: Any) -> Any:
    """Zeros in the shape of the value: a product with these adds nothing to a score."""
    if isinstance(value, Tensor):
        return zeros_like(value)
    return value if value is None else type(value)(map(zeros, value))


def without_distances(value: Any) -> Any:
    """The inputs of a Funnel layer with zeros for the vectors of distances, which come first."""
    return (zeros(value[0]), *value[1:])


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
