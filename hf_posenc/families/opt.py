"""OPT and BioGPT: a table whose first two rows stand for no position."""

from .base import Family, register_family

register_family(
    Family(
        name="opt",
        model_types=("opt",),
        positions="table",
        stacks=("decoder",),
        table="embed_positions",
        offset=lambda config: 2,
    )
)
register_family(
    Family(
        name="biogpt",
        model_types=("biogpt",),
        positions="table",
        table="embed_positions",
        offset=lambda config: 2,
    )
)
