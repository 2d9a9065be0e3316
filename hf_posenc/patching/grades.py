"""Which scheme works on which family, and who can load the result."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

from ..core.effects import Effect, Geometry
from ..errors import PosencError, UnsupportedCell
from ..families import FAMILIES, Family
from ..schemes import SCHEMES, Scheme

CONFIG, WEIGHTS, SEALED = "config", "weights", "sealed"
KINDS = {"RoPE": "rotary", "a table": "bert", "a bias": "t5", "nothing": "nope", "images": "vit"}
"""The kinds of positions that models have, each with a family that has them. Who can load a scheme depends only on the
kind."""
MEANING = {
    CONFIG: "any transformers loads it right, from its config",
    WEIGHTS: "any transformers loads it right, from its weights",
    SEALED: "hf_posenc loads it right, transformers without it refuses",
}


def is_sealed(effects: Iterable[Effect], family: Family) -> bool:
    """Whether plain transformers cannot run a model with these effects on its groups of layers.

    It must then refuse the model's checkpoints.
    """
    for effect in effects:
        rotation = effect.rotation
        nameless = rotation is not None and (rotation.rope_parameters is None or not family.rotary)
        inside = effect.bias is not None or effect.pattern is not None or effect.temperature is not None
        if nameless or inside or effect.apart or not holds_table(family, effect):
            return True
    return family.bias is not None


def holds_table(family: Family, effect: Effect) -> bool:
    """Whether the weights of a family can hold what the effect adds to the input.

    The code of vision families resizes the table to each image, which is right for trained vectors only.
    """
    if effect.table is None:
        return True
    return family.table is not None and (len(family.axes) == 1 or effect.table.reads_native)


def grade(effect: Effect, family: Family) -> str:
    """Who can load a checkpoint with this effect (see `MEANING`)."""
    if is_sealed([effect], family):
        return SEALED
    without = effect.table is None and family.table_flag is not None
    return WEIGHTS if family.table and not without else CONFIG


def refuse_lost_bias(effect: Effect, family: Family) -> None:
    """Raise where a scheme keeps the model's own positions and these are a bias: a patch cannot keep a bias."""
    if effect.pattern is not None and family.bias:
        raise UnsupportedCell(
            f"This scheme keeps a model's own positions, and the bias of the family {family.name!r} cannot be kept."
        )


def sample_geometry(family: Family) -> Geometry:
    """A common geometry, to ask a scheme what it would do on a family."""
    shape = Geometry(
        hidden_size=512,
        num_heads=8,
        head_dim=64,
        rotary_dim=64,
        trained_length=1024,
        causal=True,
        layers=12,
        rope={"rope_type": "default", "rope_theta": 10_000.0} if family.rotary else None,
    )
    if len(family.axes) == 1:
        return shape
    return replace(shape, causal=False, trained_length=196, grid=(14, 14), patch=(16, 16))


def sample_scheme(name: str) -> Scheme:
    """A scheme with only the options that it needs."""
    return _sample(SCHEMES[name])


def _sample(cls: type[Scheme]) -> Scheme:
    return cls(factor=4.0) if cls.extends else cls()


def cells() -> dict[tuple[str, str], str]:
    """For every scheme on every kind of positions: its grade, or the reason why it is refused."""
    return {(name, kind): cell(name, kind) for name in SCHEMES for kind in KINDS}


def cell(name: str, kind: str) -> str:
    """The grade of one scheme on one kind of positions, or the reason why it is refused."""
    scheme: Any = SCHEMES[name]
    return grade_or_reason(scheme, FAMILIES.registered()[KINDS[kind]])


@cache  # some schemes draw millions of parameters to say what they do
def grade_or_reason(scheme: Any, family: Family) -> str:
    """The grade of a class of schemes on a family, or the reason why it is refused there."""
    try:
        effect = _sample(scheme).effect_on(sample_geometry(family))
        refuse_lost_bias(effect, family)
        return grade(effect, family)
    except PosencError as reason:
        return f"refused: {reason}"


def table_markdown() -> str:
    """The table of schemes in the README."""
    grades = cells()
    lines = [f"| scheme | on {' | on '.join(KINDS)} | what it does |", "|---" * (len(KINDS) + 2) + "|"]
    for name in SCHEMES.built_in():
        row = " | ".join(grades[name, kind].partition(":")[0] for kind in KINDS)
        lines.append(f"| `{name}` | {row} | {SCHEMES[name].summary} |")
    return "\n".join(lines)
