"""XLM and FlauBERT."""

from .base import Family, register_family

register_family(
    Family(name="xlm", model_types=("xlm", "flaubert"), positions="table", table="position_embeddings"),
)
