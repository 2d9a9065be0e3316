"""Which schemes a model must be trained for: those that do not go on using what its weights have learnt."""

from __future__ import annotations

import re
import warnings

from ..errors import UntrainedWarning
from ..families import FAMILIES, Family
from ..schemes import SCHEMES, Scheme
from .grades import KINDS, cell, cells


def needs_training(scheme: Scheme | type[Scheme], family: Family) -> bool:
    """Whether the weights of a family's models have never seen what a scheme gives them."""
    either = [set(re.split(" and ", own)) for own in family.positions.split(" or ")]
    return not any(own <= set(scheme.keeps) for own in either)


def training_needs() -> dict[str, str]:
    """For every scheme `yes`, `no`, or where it needs none: `not on RoPE`."""
    found = {}
    grades = cells()
    for name, scheme in SCHEMES.items():
        works = [kind for kind in KINDS if not grades[name, kind].startswith("refused")]
        ready = [kind for kind in works if not needs_training(scheme, _family(kind))]
        some = [kind for kind in ready if kind != "nothing"]  # where hardly any model is
        found[name] = "no" if ready == works else f"not on {', '.join(some)}" if some else "yes"
    return found


def ready_schemes(kind: str) -> list[str]:
    """What works on models whose own positions are of this kind, as they are."""
    family = _family(kind)
    known = [name for name, scheme in SCHEMES.items() if not needs_training(scheme, family)]
    return sorted(name for name in known if not cell(name, kind).startswith("refused"))


def _family(kind: str) -> Family:
    return FAMILIES.registered()[KINDS[kind]]


def warn_untrained(scheme: Scheme, family: Family, model_type: str, stacklevel: int) -> None:
    """Say that a patch, done as asked, is no use before training, and what would be."""
    if not needs_training(scheme, family):
        return
    alike = (family.positions, family.axes)
    kind = next((kind for kind in KINDS if (_family(kind).positions, _family(kind).axes) == alike), None)
    ready = [] if kind is None else ready_schemes(kind)
    instead = f" These work on it as it is: {', '.join(ready)}." if ready else ""
    warnings.warn(
        f"{scheme.name!r} gives this {model_type!r} model positions that its weights were not trained with: it will "
        f"read badly until it is trained, for example with `hf-posenc train`.{instead}",
        UntrainedWarning,
        stacklevel=stacklevel,
    )
