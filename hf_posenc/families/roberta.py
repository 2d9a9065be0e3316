"""RoBERTa and similar models: positions are counted from the padding token's id on, without padding tokens."""

from .base import Family, register_family

register_family(
    Family(
        name="roberta",
        model_types=(
            "roberta",
            "camembert",
            "data2vec-text",
            "esm",
            "longformer",
            "roberta-prelayernorm",
            "xlm-roberta",
            "xlm-roberta-xl",
            "xmod",
        ),
        positions="table",
        table="embeddings.position_embeddings",
        embeddings="embeddings",
        makes_positions=True,
        offset=lambda config: config.pad_token_id + 1,
        counted=True,
    )
)
register_family(
    Family(
        name="mpnet",
        model_types=("mpnet",),
        positions="table and bias",
        table="embeddings.position_embeddings",
        embeddings="embeddings",
        makes_positions=True,
        offset=lambda config: 2,
        counted=True,
        bias="position_bias",
    )
)
