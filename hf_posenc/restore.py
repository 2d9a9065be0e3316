"""A patch put back from its record onto a loaded model, or refused."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from .describe import check_model
from .edits import Journal, Swap
from .families import Places, places
from .grades import is_sealed
from .measure import measure
from .records import Record
from .registry import PosencError
from .render import original_of, plan


def restore(model: PreTrainedModel, record: Record, raw: dict[str, Any]) -> None:
    """Patch a model that was just loaded from a checkpoint of itself patched, whose config.json is `raw`."""
    where = places(model)
    _refuse_other_geometry(where, record)
    journal = plan(where, record.scheme, record.geometry, loaded=record)
    _refuse_contradictions(where, record, raw, journal)
    journal.apply()


def apply_record(model: PreTrainedModel, record: Record) -> None:
    """Patch an original model as a record says; raises if it is not the original that the record was made on."""
    where = places(model)
    _refuse_other_geometry(where, record)
    if record.original != original_of(where):
        raise PosencError(
            f"The patch was made on a model whose config had {record.original}, and this one has "
            f"{original_of(where)}: it is another model, or another version of it."
        )
    plan(where, record.scheme, record.geometry).apply()
    check_model(model)


def _refuse_other_geometry(where: Places, record: Record) -> None:
    if len({where.rotary is not None, record.geometry.rope is not None, "rope_parameters" in record.original}) > 1:
        raise PosencError(
            f"The record {'has' if record.geometry.rope else 'lacks'} a RoPE, and this model "
            f"({where.config.model_type!r}) {'has one' if where.rotary is not None else 'has none'}: it was made for "
            "another model, or damaged."
        )
    live = measure(where, record.scheme, "extend")
    for name in ("hidden_size", "num_heads", "head_dim", "rotary_dim", "causal"):
        if getattr(live, name) != getattr(record.geometry, name):
            raise PosencError(
                f"The patch was made for a model with {name}={getattr(record.geometry, name)}, and this one has "
                f"{name}={getattr(live, name)}: it is another model."
            )


def _refuse_contradictions(where: Places, record: Record, raw: dict[str, Any], journal: Journal) -> None:
    """config.json says the same thing twice, for those who read `posenc` and those who do not: compare."""
    for edit in journal.edits:
        if not isinstance(edit, Swap) or edit.target is not where.config or edit.name.startswith("_"):
            continue
        key = where.config.attribute_map.get(edit.name, edit.name)
        if edit.name != "posenc" and raw.get(key) != edit.value:
            raise PosencError(
                f"config.json contradicts itself: its posenc record ({record.scheme.name!r}) means "
                f"{key}={edit.value!r}, and it has {raw.get(key)!r}. Restore the file, or patch the original anew."
            )
    if "attn_implementation" in raw and not is_sealed(record.scheme.effect(record.geometry), where.rotary is not None):
        raise PosencError(
            f"config.json names the attention {raw['attn_implementation']!r}, which its scheme does not."
        )
