"""Applies a patch to a loaded model again from its record, or refuses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from ..core.effects import Effect
from ..errors import PosencError
from ..families import Places
from ..families.places import grid_size
from ..patching.checks import check_patch
from ..patching.configs import places_to_patch
from ..patching.edits import Entry, Journal, Swap
from ..patching.layer_plans import divide_places
from ..patching.measure import model_sizes
from ..patching.plan import plan
from ..patching.records import Record, original_values, section_of
from ..patching.seal import SINCE_FORMAT_2
from ..runtime.positions import SEAL
from ..runtime.rotary import UNROTATED
from ..schemes.frequencies import MSCALES
from ..schemes.plans import Plan


def restore(
    model: PreTrainedModel, record: Record, raw: dict[str, Any], effects: dict[str, Effect] | None = None
) -> None:
    """Patch a model that was just loaded from its patched checkpoint, whose config.json is `raw`.

    `effects`: those of the record, where they were computed before; their modules go into the model.
    """
    where = places_to_patch(model)
    if isinstance(record.scheme, Plan):
        where = divide_places(where, record.scheme)
    refuse_other_geometry(where, record)
    # A file has its keys in alphabetical order, the model has its groups in the order of its layers.
    names = [group.name for group in where.groups if group.name in record.geometries]
    record = replace(record, geometries={name: record.geometries[name] for name in names})
    effects = None if effects is None else {name: effects[name] for name in names}
    journal = plan(where, record.scheme, record.geometries, loaded=record, effects=effects)
    section = section_of(raw, where.family)
    _refuse_other_entries(section, record, journal)
    _refuse_contradictions(where, record, raw, section, journal)
    journal.apply()


def apply_record(model: PreTrainedModel, record: Record) -> None:
    """Patch an original model as a record says. Raises if the record was made on another model."""
    where = divide_places(places_to_patch(model), record.scheme)
    refuse_other_geometry(where, record)
    found = original_values(where, record.scheme)
    if record.original != found:
        raise PosencError(
            f"The patch was made on a model whose config had {record.original}, and this one has {found}: it is "
            "another model, or another version of it."
        )
    plan(where, record.scheme, record.geometries).apply()
    check_patch(model, record)


def refuse_other_geometry(where: Places, record: Record) -> None:
    """Raise where a record was made on another kind or size of model."""
    geometry = record.geometry
    record.refuse_other_family(where.family)
    if geometry.axes != len(where.family.axes):
        made, live = ("images", "text") if geometry.axes > 1 else ("a text", "images")
        raise PosencError(f"The posenc record was made for {made}, and this model reads {live}: it is another model.")
    lacking = sorted(set(original_values(where, record.scheme)) - set(record.original))
    if lacking:
        raise PosencError(f"The original of the posenc record lacks {', '.join(lacking)}: it is damaged.")
    has_rope = geometry.rope is not None
    if has_rope != where.has_rotary or (has_rope and "rope_parameters" not in record.original):
        raise PosencError(
            f"The record {'has' if geometry.rope else 'lacks'} a RoPE, and this model "
            f"({where.config.model_type!r}) {'has one' if where.has_rotary else 'has none'}: it was made for "
            "another model, or damaged."
        )
    groups = {group.name: group for group in where.groups}
    for name, meant in record.geometries.items():
        if name not in groups:
            raise PosencError(
                f"The patch was made for layers {name!r}, and this model has {', '.join(map(repr, groups))}: it is "
                "another model."
            )
        found = model_sizes(groups[name])
        if meant.grid:
            found["grid"] = grid_size(record.original[where.family.length], groups[name].stack.patch)
        for key, value in found.items():
            if value != getattr(meant, key):
                raise PosencError(
                    f"The patch was made for a model with {key}={getattr(meant, key)}, and this one has "
                    f"{key}={value}: it is another model."
                )


def _contradiction(record: Record, key: str, meant: Any, found: Any) -> PosencError:
    return PosencError(
        f"config.json contradicts itself: its posenc record ({record.scheme.name!r}) means {key}={meant!r}, "
        f"and the file has {key}={found!r}. Restore the file, or patch the original anew."
    )


def _refuse_other_entries(section: dict[str, Any], record: Record, journal: Journal) -> None:
    """Raise where config.json has other values for other runtimes than the patch would write.

    Such values may be missing: transformers drops them when it saves a model by itself.
    """
    for edit in journal.edits:
        if isinstance(edit, Entry) and section.get(edit.name, edit.value) != edit.value:
            raise _contradiction(record, edit.name, edit.value, section[edit.name])


def _refuse_contradictions(
    where: Places, record: Record, raw: dict[str, Any], section: dict[str, Any], journal: Journal
) -> None:
    """Raise where config.json says one thing to programs that read `posenc`, and another thing to those that do not.

    `section`: the part of config.json that describes positions.
    """
    sealed = False
    for edit in journal.edits:
        if not isinstance(edit, Swap) or edit.name.startswith("_") or edit.name == "posenc":
            continue
        if edit.target is where.config:
            values = section
        elif edit.target is where.model_config:
            values = raw
        else:
            continue
        sealed |= edit.value == SEAL
        if record.format == 1 and edit.name in SINCE_FORMAT_2:
            continue
        key = edit.target.attribute_map.get(edit.name, edit.name)
        found, meant = values.get(key), edit.value
        if key not in values and values is section is not raw:  # a section leaves out the defaults of its class
            found = getattr(type(where.config)(), key, None)
        older = record.format == 1 and key == "rope_parameters" and is_older_writing(found, meant)
        if not older and found != (list(meant) if isinstance(meant, tuple) else meant):
            raise _contradiction(record, key, meant, found)
    if "attn_implementation" in raw and not sealed:
        raise PosencError(
            f"config.json names the attention {raw['attn_implementation']!r}, which its scheme does not."
        )


def is_older_writing(found: Any, meant: Any) -> bool:
    """Whether version 0.1.0 wrote these rope parameters, of one or all types of layers, for the same rotation."""
    if not isinstance(found, dict) or not isinstance(meant, dict):
        return bool(found == meant)
    if "rope_type" not in meant:
        return found.keys() == meant.keys() and all(is_older_writing(found[key], meant[key]) for key in meant)
    if any(
        found == {**_without(meant, way), **other} for way in UNROTATED for other in UNROTATED if _says(meant, way)
    ):
        return True
    return bool(found == _without(meant, (*MSCALES, "mscale", "mscale_all_dim")))


def _says(rope: Mapping[str, Any], way: Mapping[str, Any]) -> bool:
    return all(rope.get(key) == value for key, value in way.items())


def _without(rope: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    return {key: value for key, value in rope.items() if key not in set(keys)}
