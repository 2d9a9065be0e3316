"""BERT, as encoder or decoder."""

from .base import Family, register

register(
    Family(
        name="bert",
        model_types=("bert",),
        layers="encoder.layer",
        self_attention="attention.self",
        cross_attention="crossattention.self",
        table="embeddings.position_embeddings",
        embeddings="embeddings",
    )
)
