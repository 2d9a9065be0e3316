"""GPT-2 and its kin: a learned table beside the word embeddings."""

from .base import Family, register_family

register_family(
    Family(
        name="gpt2",
        model_types=("gpt2", "gpt-sw3", "gpt_bigcode", "gpt_neo"),
        positions="table",
        table="wpe",
    )
)
register_family(Family(name="gpt", model_types=("openai-gpt",), positions="table", table="positions_embed"))
