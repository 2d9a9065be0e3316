"""Which schemes a model must be trained for: those that do not go on using what its weights have learnt."""

from __future__ import annotations

import warnings
from typing import Any

from ..errors import UntrainedWarning
from ..families import FAMILIES, Family
from ..schemes import SCHEMES, Scheme
from .grades import KINDS, cells, grade_or_reason


def needs_training(scheme: Scheme | type[Scheme], family: Family) -> bool:
    """Whether a scheme gives a family's models positions that their weights were not trained with."""
    return not any([set(own.split(" and ")) <= set(scheme.keeps) for own in family.positions.split(" or ")])


def training_needs() -> dict[str, str]:
    """For every scheme `yes`, `no`, or on which kinds of models it needs no training: `not on RoPE`."""
    found = {}
    grades, families = cells(), FAMILIES.registered()
    for name, scheme in SCHEMES.items():
        works = [kind for kind in KINDS if not grades[name, kind].startswith("refused")]
        ready = [kind for kind in works if not needs_training(scheme, families[KINDS[kind]])]
        some = [kind for kind in ready if kind != "nothing"]  # hardly any model has no positions
        found[name] = "no" if ready == works else f"not on {', '.join(some)}" if some else "yes"
    return found


def ready_schemes(kind: str) -> list[str]:
    """The schemes that work without training on models whose own positions are of this kind."""
    family = FAMILIES.registered()[KINDS[kind]]
    ready: list[tuple[str, Any]] = [(n, scheme) for n, scheme in SCHEMES.items() if not needs_training(scheme, family)]
    return sorted([name for name, scheme in ready if not grade_or_reason(scheme, family).startswith("refused")])


def warn_untrained(scheme: Scheme, family: Family, model_type: str) -> None:
    """Warn that a patched model must be trained first, and name the schemes that work without training.

    The warning points at the line that called the caller of this function.
    """
    if not needs_training(scheme, family):
        return
    families = FAMILIES.registered()
    kinds = {(families[name].positions, families[name].axes): kind for kind, name in reversed(KINDS.items())}
    kind = kinds.get((family.positions, family.axes))
    ready = [] if kind is None else ready_schemes(kind)
    instead = f" These work on it as it is: {', '.join(ready)}." if ready else ""
    warnings.warn(
        f"{scheme.name!r} gives this {model_type!r} model positions that its weights were not trained with: it will "
        f"read badly until it is trained, for example with `hf-posenc train`.{instead}",
        UntrainedWarning,
        stacklevel=3,
    )
