"""Which scheme works on which family, and who can load the result."""

from __future__ import annotations

from .families import FAMILIES, Family
from .registry import PosencError
from .schemes import SCHEMES, Scheme
from .sites import Effect, Geometry

CONFIG, WEIGHTS, SEALED = "config", "weights", "sealed"
MEANING = {
    CONFIG: "any transformers loads it right, from its config",
    WEIGHTS: "any transformers loads it right, from its weights",
    SEALED: "hf_posenc loads it right, transformers without it refuses",
}


def is_sealed(effect: Effect, has_rotary: bool) -> bool:
    """Whether plain transformers cannot run this, so that a checkpoint of it must be refused there."""
    rotation = effect.rotation
    if effect.bias is not None or (rotation is not None and rotation.follows_length):
        return True
    return effect.table is not None if has_rotary else rotation is not None


def grade(effect: Effect, has_rotary: bool) -> str:
    """How a checkpoint of this effect travels."""
    if is_sealed(effect, has_rotary):
        return SEALED
    return CONFIG if has_rotary else WEIGHTS


def sample_geometry(family: Family) -> Geometry:
    """A common shape, to ask a scheme what it would do on a family."""
    return Geometry(
        hidden_size=512,
        num_heads=8,
        head_dim=64,
        rotary_dim=64,
        trained_length=1024,
        causal=True,
        rope={"rope_type": "default", "rope_theta": 10_000.0} if family.rotary else None,
    )


def sample_scheme(name: str) -> Scheme:
    """A scheme with only what it must be told."""
    cls = SCHEMES[name]
    return cls(factor=4.0) if cls.extends else cls()


def cells() -> dict[tuple[str, str], str]:
    """Every (scheme, family) with its grade, or the reason why it is refused."""
    table = {}
    for name in SCHEMES:
        for family in FAMILIES.values():
            try:
                effect = sample_scheme(name).effect(sample_geometry(family))
                table[name, family.name] = grade(effect, family.rotary is not None)
            except PosencError as reason:
                table[name, family.name] = f"refused: {reason}"
    return table


def serving_advice(scheme: str, portability: str) -> str:
    """Which runtimes other than transformers can serve a model, honestly."""
    if scheme not in SCHEMES:
        return "whatever serves the unpatched model"
    if portability.startswith(WEIGHTS):
        return "any that serves this family: the table is part of the weights"
    if portability.startswith(CONFIG):
        if scheme in ("none", "proportional"):
            return "none is known to read this rope_type; transformers does"
        return "those that read rope_parameters (vLLM, llama.cpp after conversion); not measured here"
    nearest = SCHEMES[scheme].nearest
    if nearest is None:
        return "none can; no scheme that they know is near it (yarn or ntk extend the same base model)"
    return f"none can; the nearest scheme that they know is {nearest!r}"


def table_markdown() -> str:
    """The table of the README."""
    grades, names = cells(), list(FAMILIES)
    lines = [f"| scheme | {' | '.join(names)} | what it does |", "|---" * (len(names) + 2) + "|"]
    for name, scheme in SCHEMES.items():
        row = " | ".join(grades[name, family].partition(":")[0] for family in names)
        lines.append(f"| `{name}` | {row} | {scheme.summary} |")
    return "\n".join(lines)
