"""XLM and FlauBERT."""

from .base import Family, register

register(
    Family(name="xlm", model_types=("xlm", "flaubert"), positions="table", table="position_embeddings"),
)
