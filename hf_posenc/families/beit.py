"""BEiT: a relative bias for each layer or one for all layers, a table, several of these, or none."""

from .base import VisionFamily, register_family

register_family(
    VisionFamily(
        name="beit",
        model_types=("beit",),
        positions="bias or table",
        biases=("shared_position_bias", "relative_position_bias"),
        bias_flags=("use_shared_relative_position_bias", "use_relative_position_bias"),
        table_flag="use_absolute_position_embeddings",
    )
)
