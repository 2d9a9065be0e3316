"""From a scheme to the edits that it means on a live model, site by site.

Every site is set: what a scheme leaves out is neutralised, so that replacing never becomes stacking.
"""

from __future__ import annotations

from typing import Any

from ..core.effects import Effect
from ..errors import PosencError, UnsupportedCell
from ..families import Group, Places, Stack
from ..schemes import Scheme
from ..schemes.plans import BY_LIST, Asked, Plan
from .attention import attention_edits, refuse_several_positions, stranger_edits
from .edits import Edit, Hook, Journal, Swap
from .grades import is_sealed
from .layer_plans import divided, planned_rotary_edits, refuse_unlike, resolved
from .measure import measure
from .own_temperature import own_temperature_edits
from .records import Geometries, Record, family_from_outside, is_listed, original_values
from .rotary_site import rotary_edits
from .said_plans import listed_edits, refuse_unsaid, ways_to_say
from .seal import seal_edits
from .sidecar import before_state_dict
from .sizes import promised_size, size_edits
from .tables import table_edits

LOST = (
    "this model was loaded from a patched checkpoint, which does not hold the position table that the model had "
    "before, or its bias; load the original model instead"
)


def settled(
    asked: Asked, where: Places, existing: str | None, layer_types: Any = None
) -> tuple[Scheme, Places, Geometries]:
    """What was asked for on this model, whose layers a plan has divided, and its geometries. A plan is said by the
    config where that can be."""
    scheme = resolved(asked, where)
    where = divided(where, scheme)
    for said in ways_to_say(scheme, where):
        try:
            geometries = measure(where, said, existing, layer_types)
            plan(where, said, geometries)
            return said, where, geometries
        except UnsupportedCell:  # by the next way, or sealed
            continue
    return scheme, where, measure(where, scheme, existing, layer_types)


def plan(
    where: Places, scheme: Scheme, geometries: Geometries, *, loaded: Record | None = None, lost: str | None = None
) -> Journal:
    """All edits that the scheme means on this model. Nothing is changed yet.

    0. The model has been given configs of its own to write in (`configs`).
    1. The scheme says what it contributes to each group of layers (`Scheme.effect_on`).
    2. The config is told how far positions reach, and which kinds of them there are (`sizes`).
    3. Each stack gets its table (`tables`), rotary modules (`rope_config`) and work in attention (`attention`).
    4. Where plain transformers cannot run the result, config and weights are sealed, so that all others refuse.
    5. The config keeps a record of it all, and the model this journal, to undo it with.

    `loaded`: the model has just been loaded from a checkpoint of itself patched, and its tables hold what that says.
    `lost`: why the model's own table is not at hand any more.
    """
    record = loaded or Record(scheme, geometries, original_values(where, scheme), family_from_outside(where.family))
    effects = record.effects()
    first = next(iter(effects.values()))
    if lost is not None and first.table is not None and first.table.reads_native:
        raise PosencError(f"{scheme.name!r} starts from the model's own table: {lost}.")
    reach = scheme.span(record.geometry)
    sealed = is_sealed(effects.values(), where.family)
    size = promised_size(where, first, reach)
    edits: list[Edit] = [where.own_configs, *size_edits(where, first, size)]
    for stack in where.stacks:
        groups = [group for group in where.groups if group.stack is stack and group.name in effects]
        if groups:
            refuse_several_positions(where, stack, effects)
            effect, geometry = effects[groups[0].name], geometries[groups[0].name]
            if stack.embeddings is not None or stack.table is not None or effect.table is not None:
                edits += table_edits(stack, effect, geometry, size, reach.target, sealed, loaded is not None)
            if scheme.apart:
                refuse_unlike(where, groups, effects, geometries)
            elif isinstance(scheme, Plan):
                refuse_unsaid(where, effects)
            edits += _rotary_edits(stack, groups, record, effects, geometries, sealed)
            edits += attention_edits(stack, groups, effects, geometries)
            edits += own_temperature_edits(stack, groups, effects)
    if sealed:
        edits += seal_edits(where)
        edits += stranger_edits(where)
    edits.append(Swap(where.model_config, "posenc", record.to_dict()))
    edits.append(Hook(where.model, before_state_dict, before="state dict"))
    journal = Journal(edits, final=LOST if loaded is not None and where.has_table else lost)
    edits.append(Swap(where.base, "posenc_journal", journal))
    return journal


def _rotary_edits(
    stack: Stack, groups: list[Group], record: Record, effects: dict[str, Effect], geometries: Geometries, sealed: bool
) -> list[Edit]:
    """The model's own rotary modules, or those of the parts of a plan beside them."""
    scheme, reach = record.scheme, record.scheme.span(record.geometry)
    if not stack.rotaries:
        return []
    if scheme.apart:
        return planned_rotary_edits(stack, groups, effects)
    if is_listed(record):
        return listed_edits(stack, groups, effects, geometries, reach, record.original[BY_LIST])
    return rotary_edits(stack, groups, effects, geometries, reach, sealed, scheme.rescales)
