"""Where a live model does not do what its config says."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from ..compat.pytorch import usual_defaults
from ..errors import PosencError
from ..families import Places, places
from ..schemes.plans import BY_LIST, Plan
from .attention import attention_faults
from .config_plans import layer_list_faults
from .grades import is_sealed
from .layer_plans import divide_places, plan_rotary_faults
from .own_temperature import own_temperature_faults
from .patch_state import journal_of, record_of, unwrap_model
from .records import Record
from .relative_keys import relative_keys_scheme
from .rotary_site import rotary_faults
from .seal import seal_faults
from .sizes import size_faults
from .tables import table_faults


@usual_defaults()
def check_model(model: Any) -> None:
    """Raise where the live model does not do what its config says, with every disagreement found."""
    model = unwrap_model(model)
    record, patched = record_of(model), journal_of(model) is not None
    if record is None and patched:
        _refuse(["the model is patched, and its config has lost the 'posenc' record"])
    elif record is None:
        _refuse(own_faults(places(model)))
    elif patched:
        check_patch(model, record)
    else:
        _refuse(
            [
                f"the config says that the model is patched with {record.scheme.name!r}, and no patch is in place; "
                "load the checkpoint with hf_posenc.load"
            ]
        )


@usual_defaults()
def check_patch(model: PreTrainedModel, record: Record) -> None:
    """Raise where a patched model does not do what its record says."""
    faults = patch_faults(places(model), record)
    if faults:
        _refuse(faults)


def _refuse(faults: list[str]) -> None:
    if faults:
        raise PosencError("The model and its config disagree: " + "; ".join(faults) + ".")


def own_faults(where: Places) -> list[str]:
    """Where a model that is not patched does not do what its config says."""
    faults = []
    if relative_keys_scheme(where.config.to_dict()) is not None:
        faults.append(
            "the config asks for relative keys (position_embedding_type), which transformers has dropped since its "
            "version 5; load the checkpoint with hf_posenc.load"
        )
    for stack in where.stacks:
        groups = [group for group in where.groups if group.stack is stack]
        faults += rotary_faults(stack, groups, {}, False, {})
    return faults


def patch_faults(where: Places, record: Record) -> list[str]:
    """Where a patched model does not do what its record says, site by site."""
    scheme, geometries = record.scheme, record.geometries
    if isinstance(scheme, Plan):
        where = divide_places(where, scheme)
    groups_of = {stack: [group for group in where.groups if group.stack is stack] for stack in where.stacks}
    patched_of = {
        stack: [group for group in groups if group.name in geometries] for stack, groups in groups_of.items()
    }
    effects = scheme.effects(geometries)
    reach = scheme.span(next(iter(geometries.values())))
    first = next(iter(effects.values()))
    sealed = is_sealed(effects.values(), where.family)
    faults = size_faults(where, first, reach, record.original)
    for stack, groups in groups_of.items():
        patched = patched_of[stack]
        if isinstance(scheme, Plan) and scheme.by == BY_LIST:
            faults += layer_list_faults(stack, groups, patched, effects, record.original)
        elif not first.apart:
            faults += rotary_faults(stack, groups, effects, sealed, record.original)
        elif stack.rotaries:
            faults += plan_rotary_faults(stack, patched, effects)
        faults += attention_faults(stack, patched, effects, geometries)
        faults += own_temperature_faults(stack, patched, effects)
        faults += table_faults(stack, first)
    faults += seal_faults(where.model)
    return list(dict.fromkeys(faults))
