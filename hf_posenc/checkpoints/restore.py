"""A patch put back from its record onto a loaded model, or refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from ..errors import PosencError
from ..families import ImagePlaces, Places, image_places, places
from ..families.towers import pair
from ..patching.describe import check_model
from ..patching.edits import Journal, Swap
from ..patching.grades import is_sealed
from ..patching.measure import sizes
from ..patching.plan import original_of, plan
from ..patching.plan_images import image_sizes, original_values, plan_images
from ..patching.records import Record, text_section, vision_section
from ..patching.seal import SINCE_FORMAT_2


def restore(model: PreTrainedModel, record: Record, raw: dict[str, Any]) -> None:
    """Patch a model that was just loaded from a checkpoint of itself patched, whose config.json is `raw`."""
    images = image_places(model)
    if images is not None:
        return _restore_images(images, record, raw)
    where = places(model)
    refuse_other_geometry(where, record)
    # A file keeps its keys in the order of the alphabet, the model its groups in their own.
    ordered = {g.name: record.geometries[g.name] for g in where.groups() if g.name in record.geometries}
    record = replace(record, geometries=ordered)
    journal = plan(where, record.scheme, record.geometries, loaded=record)
    sealed = any(is_sealed(effect, where.family) for effect in record.effects().values())
    _refuse_contradictions(where, text_section(raw), record, raw, journal, sealed)
    journal.apply()


def _restore_images(where: ImagePlaces, record: Record, raw: dict[str, Any]) -> None:
    refuse_other_images(where, record)
    journal = plan_images(where, record.scheme, record.geometry, loaded=record)
    defaults = type(where.config)()  # which the file leaves out of parts of a config
    section = {"image_size": defaults.image_size, **vision_section(raw, where.model.config.model_type)}
    sealed = record.scheme.on_images(record.geometry).sealed
    _refuse_contradictions(where, section, record, raw, journal, sealed)
    resized = any(
        isinstance(edit, Swap) and edit.name == "image_size" and edit.target is where.config for edit in journal.edits
    )
    if not resized and section["image_size"] != record.original["image_size"]:
        raise PosencError(
            f"config.json contradicts itself: it has image_size={section['image_size']!r}, and its posenc record was "
            f"made for {record.original['image_size']!r}. Restore the file, or patch the original anew."
        )
    journal.apply()


def apply_record(model: PreTrainedModel, record: Record) -> None:
    """Patch an original model as a record says; raises if it is not the original that the record was made on."""
    where = image_places(model) or places(model)
    if isinstance(where, ImagePlaces):
        refuse_other_images(where, record)
        found = original_values(where)
    else:
        refuse_other_geometry(where, record)
        found = original_of(where)
    if record.original != found:
        raise PosencError(
            f"The patch was made on a model whose config had {record.original}, and this one has {found}: it is "
            "another model, or another version of it."
        )
    if isinstance(where, ImagePlaces):
        plan_images(where, record.scheme, record.geometry).apply()
    else:
        plan(where, record.scheme, record.geometries).apply()
    check_model(model)


def refuse_other_images(where: ImagePlaces, record: Record) -> None:
    """Raise where a record was made on another kind or size of model."""
    meant, live = record.geometry, image_sizes(where)
    if not meant.grid:
        raise PosencError("The posenc record was made for a text, and this model reads images: it is another model.")
    if set(record.original) != set(original_values(where)):
        raise PosencError(
            f"The original of the posenc record has {sorted(record.original)}, and this model's config would have "
            f"{sorted(original_values(where))}: it is damaged, or made for another model."
        )
    height, width = pair(record.original["image_size"])
    live["grid"] = (height // where.patch[0], width // where.patch[1])
    for name, value in live.items():
        if value != getattr(meant, name):
            raise PosencError(
                f"The patch was made for a model with {name}={getattr(meant, name)}, and this one has {name}={value}: "
                "it is another model."
            )


def refuse_other_geometry(where: Places, record: Record) -> None:
    if record.geometry.grid:
        raise PosencError("The posenc record was made for images, and this model reads text: it is another model.")
    lacking = sorted(set(original_of(where)) - set(record.original))
    if lacking:
        raise PosencError(f"The original of the posenc record lacks {', '.join(lacking)}: it is damaged.")
    said = record.geometry.rope is not None
    if said != where.has_rotary or (said and "rope_parameters" not in record.original):
        raise PosencError(
            f"The record {'has' if record.geometry.rope else 'lacks'} a RoPE, and this model "
            f"({where.config.model_type!r}) {'has one' if where.has_rotary else 'has none'}: it was made for "
            "another model, or damaged."
        )
    groups = {group.name: group for group in where.groups()}
    for group, meant in record.geometries.items():
        if group not in groups:
            raise PosencError(
                f"The patch was made for layers {group!r}, and this model has {', '.join(map(repr, groups))}: it is "
                "another model."
            )
        live = sizes(groups[group])
        for name, value in live.items():
            if value != getattr(meant, name):
                raise PosencError(
                    f"The patch was made for a model with {name}={getattr(meant, name)}, and this one has "
                    f"{name}={value}: it is another model."
                )


def _refuse_contradictions(
    where: Places | ImagePlaces,
    section: dict[str, Any],
    record: Record,
    raw: dict[str, Any],
    journal: Journal,
    sealed: bool,
) -> None:
    """config.json says the same thing twice, for those who read `posenc` and those who do not: compare."""
    for edit in journal.edits:
        if not isinstance(edit, Swap) or edit.name.startswith("_") or edit.name == "posenc":
            continue
        if edit.target is where.config:
            said = section
        elif edit.target is where.model.config:
            said = raw
        else:
            continue
        if record.format == 1 and edit.name in SINCE_FORMAT_2:
            continue
        key = edit.target.attribute_map.get(edit.name, edit.name)
        if said.get(key) != edit.value:
            raise PosencError(
                f"config.json contradicts itself: its posenc record ({record.scheme.name!r}) means "
                f"{key}={edit.value!r}, and it has {said.get(key)!r}. Restore the file, or patch the original anew."
            )
    if "attn_implementation" in raw and not sealed:
        raise PosencError(
            f"config.json names the attention {raw['attn_implementation']!r}, which its scheme does not."
        )
