"""BART and similar models: an encoder and a decoder, each with a table. Cross-attention has no positions."""

from .base import Family, register_family

register_family(
    Family(
        name="bart",
        model_types=("bart", "mbart", "plbart", "mvp"),
        positions="table",
        stacks=("encoder", "decoder"),
        table="embed_positions",
        offset=lambda config: 2,
    )
)
register_family(
    Family(
        name="pegasus",
        model_types=("blenderbot", "blenderbot-small", "bigbird_pegasus", "marian", "pegasus"),
        positions="table",
        stacks=("encoder", "decoder"),
        table="embed_positions",
    )
)
register_family(
    Family(
        name="whisper",
        model_types=("whisper",),
        positions="table",
        stacks=("decoder",),
        table="embed_positions",
        length="max_target_positions",
    )
)
