"""DeBERTa: its attention has terms of content and relative positions, which its config can switch off."""

from .base import Family, register_family

register_family(
    Family(
        name="deberta",
        model_types=("deberta", "deberta-v2"),
        positions="content and relative positions together",
        table="embeddings.position_embeddings",
        table_flag="position_biased_input",
        embeddings="embeddings",
        biases=("rel_embeddings", "pos_proj", "pos_q_proj", "pos_key_proj", "pos_query_proj"),
        bias_flags=("relative_attention",),
    )
)
