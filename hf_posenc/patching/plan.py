"""From a scheme to the edits that it means on a live model, site by site.

Every site is set. What a scheme leaves out is switched off, so that a scheme never comes on top of another one.
"""

from __future__ import annotations

from typing import Any

from ..compat.pytorch import usual_defaults
from ..core.effects import Effect, Span
from ..errors import PosencError, UnsupportedCell
from ..families import Group, Places, Stack
from ..runtime.positions import Link
from ..schemes import Scheme
from ..schemes.plans import BY_LIST, Draft, Plan, SchemeOrDraft
from .attention import attention_edits, refuse_several_positions
from .config_plans import check_config_plan, config_plans_for, layer_list_edits
from .edits import Edit, Hooks, Journal, Swap
from .grades import is_sealed, refuse_lost_bias
from .layer_plans import check_parts, divide_places, plan_on, plan_rotary_edits
from .measure import measure
from .own_temperature import own_temperature_edits
from .records import Geometries, Record, original_values, outside_family
from .rotary_site import rotary_edits
from .seal import seal_edits
from .sealed_rotary import sealed_rotary_edits
from .sidecar import before_state_dict
from .sizes import config_size, size_edits
from .tables import table_edits

LOST = (
    "this model was loaded from a patched checkpoint, which does not hold the position table that the model had "
    "before, or its bias; load the original model instead"
)
Effects = dict[str, Effect]
"""By name of a group of layers."""


def fit(
    request: SchemeOrDraft, where: Places, existing: str | None, layer_types: Any = None
) -> tuple[Scheme, Places, Geometries]:
    """The scheme that was asked for, the places and the geometries on this model.

    A plan divides the groups of layers. If the model's config can say the plan, it is made to do so.
    """
    if not isinstance(request, Draft):
        return request, where, measure(where, request, existing, layer_types)
    scheme = plan_on(request, where)
    where = divide_places(where, scheme)
    for option in config_plans_for(scheme, where):
        try:
            geometries = measure(where, option, existing, layer_types)
            plan(where, option, geometries)
            return option, where, geometries
        except UnsupportedCell:  # then the next way is tried; in the end the plan is sealed
            continue
    return scheme, where, measure(where, scheme, existing, layer_types)


@usual_defaults()
def plan(
    where: Places,
    scheme: Scheme,
    geometries: Geometries,
    *,
    loaded: Record | None = None,
    effects: Effects | None = None,
    lost: str | None = None,
) -> Journal:
    """All edits that the scheme means on this model. Nothing is changed yet.

    1. The scheme says what it contributes to each group of layers (`Scheme.effect_on`).
    2. The model is given its own copies of its configs (`configs`), which the other edits write to.
    3. The config is told how far positions reach, and which kinds of positions there are (`sizes`).
    4. Each stack gets its table (`tables`), its rotary modules (`rotary_site`) and work in attention (`attention`).
    5. Where plain transformers cannot run the result, config and weights are sealed, so that everything else refuses.
    6. The config keeps a record of it all, and the model keeps this journal, which can undo it.

    `loaded`: the record of the checkpoint that the model was just loaded from; its tables are the patched ones.
    `effects`: what the scheme contributes, where that was computed before; its modules go into the model.
    `lost`: why the model's own table is no longer available.
    """
    groups_of = {s: [g for g in where.groups if g.stack is s and g.name in geometries] for s in where.stacks}
    record = loaded or Record(scheme, geometries, original_values(where, scheme), outside_family(where.family))
    effects = scheme.effects(geometries) if effects is None else effects
    first = next(iter(effects.values()))
    if lost is not None and first.table is not None and first.table.reads_native:
        raise PosencError(f"{scheme.name!r} starts from the model's own table: {lost}.")
    reach = scheme.span(next(iter(geometries.values())))
    sealed = is_sealed(effects.values(), where.family)
    for effect in effects.values():
        refuse_lost_bias(effect, where.family)
    size = config_size(where, first, reach)
    edits: list[Edit] = [where.own_configs, *size_edits(where, first, size)]
    for stack, groups in groups_of.items():
        if groups:
            refuse_several_positions(where, stack, effects)
            effect, geometry = effects[groups[0].name], geometries[groups[0].name]
            if stack.embeddings is not None or stack.table is not None or effect.table is not None:
                edits += table_edits(stack, effect, geometry, size, reach.target, sealed, loaded is not None)
            if effect.apart:
                check_parts(where, groups, effects, geometries)
            elif isinstance(scheme, Plan):
                check_config_plan(where, effects)
            if stack.rotaries:
                edits += _rotary_edits(stack, groups, record, effects, reach, sealed)
            edits += attention_edits(stack, groups, effects, geometries)
            edits += own_temperature_edits(stack, groups, effects)
    if sealed:
        edits += seal_edits(where)
        edits += [Swap(layer, "posenc_link", Link(None)) for layer in where.strangers]
    edits.append(Swap(where.model_config, "posenc", record.to_dict()))
    edits.append(Hooks([where.model], before_state_dict, before="state dict"))
    journal = Journal(edits, final=LOST if loaded is not None and where.has_table else lost)
    edits.append(Swap(where.base, "posenc_journal", journal))
    return journal


def _rotary_edits(
    stack: Stack, groups: list[Group], record: Record, effects: Effects, reach: Span, sealed: bool
) -> list[Edit]:
    """How the model's own rotary modules change, or what the parts of a plan put beside them."""
    scheme, geometries = record.scheme, record.geometries
    if effects[groups[0].name].apart:
        return plan_rotary_edits(stack, groups, effects)
    if isinstance(scheme, Plan) and scheme.by == BY_LIST:
        return layer_list_edits(stack, groups, effects, geometries, reach, record.original[BY_LIST])
    if sealed:
        return sealed_rotary_edits(stack, groups, effects)
    return rotary_edits(stack, groups, effects, geometries, reach, scheme.rescales)
