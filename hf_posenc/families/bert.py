"""BERT and similar models, as encoder or decoder."""

from .base import Family, register_family

register_family(
    Family(
        name="bert",
        model_types=(
            "bert",
            "albert",
            "bert-generation",
            "big_bird",
            "convbert",
            "distilbert",
            "electra",
            "ernie",
            "megatron-bert",
            "mobilebert",
            "rembert",
            "roc_bert",
            "squeezebert",
        ),
        positions="table",
        table="embeddings.position_embeddings",
        embeddings="embeddings",
    )
)
register_family(
    Family(
        name="yoso",
        model_types=("nystromformer", "yoso"),
        positions="table",
        table="embeddings.position_embeddings",
        embeddings="embeddings",
        offset=lambda config: 2,
    )
)
