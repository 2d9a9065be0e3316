"""What a live model of images does with positions, read from its modules, and where its config says otherwise."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from ..compat.adapters import without_copies
from ..compat.models import attention_of
from ..compat.pytorch import has_pre_hook
from ..core.effects import ImageEffect
from ..families import ImagePlaces
from ..families.towers import pair
from ..runtime.grids import FLAG, GridReader, before_image, before_patches, before_rotation
from ..runtime.positions import PREFIX
from .grades import MEANING, image_grade
from .plan_images import table_rows
from .records import Record


@dataclass(frozen=True)
class ImageDescription:
    """The answer of `describe` for a model of images. Print it, or read its fields."""

    model: str
    scheme: str
    options: dict[str, Any]
    image_size: tuple[int, int]
    """Height and width that the config speaks of, in pixels; a patched model takes others as well."""
    patch_size: tuple[int, int]
    grid: tuple[int, int]
    """Rows and columns of patches in such an image."""
    axes: str
    special_tokens: int
    """Before the patches: classes, registers. They have no position, but for a learned one of their own."""
    rotation: str
    kernel: str
    table: str
    bias: str
    portability: str

    def __str__(self) -> str:
        return listed(self)


def listed(description: Any) -> str:
    """A description, a line for each thing that there is to say."""
    lines = []
    for field in fields(description):
        value = getattr(description, field.name)
        if value is None or value == {}:
            continue
        text = f"{value:.6g}" if isinstance(value, float) else str(value)
        lines.append(f"{field.name.replace('_', ' '):<22}{text}")
    return "\n".join(lines)


def describe_images(where: ImagePlaces, record: Record | None) -> ImageDescription:
    found = None if record is None else image_grade(record.scheme.on_images(record.geometry), where.family)
    bias = ", ".join(sorted({type(site.module).__name__ for site in where.biases})) or "none"
    table = _live_table(where)
    own = " and ".join(word for word, there in (("bias", bias != "none"), ("table", table != "none")) if there)
    rotation = getattr(where.root, "posenc_rotation", None)
    return ImageDescription(
        model=f"{type(where.model).__name__} ({where.model.config.model_type})",
        scheme=record.scheme.name if record else f"{own or 'none'} (the model's own)",
        options=record.scheme.options() if record else {},
        image_size=pair(where.config.image_size),
        patch_size=where.patch,
        grid=where.grid,
        axes="x, y",
        special_tokens=where.special,
        rotation="none" if rotation is None else str(rotation),
        kernel=attention_of(where.config),
        table=table,
        bias=bias,
        portability="unpatched" if found is None else f"{found}: {MEANING[found]}",
    )


def _live_table(where: ImagePlaces) -> str:
    """What adds a vector per patch to the input."""
    if isinstance(vars(where.embeddings).get(FLAG), GridReader):
        return str(getattr(where.root, "posenc_table", "none"))
    rows = table_rows(where.table.module)
    if rows is None:
        return "none"
    return f"{len(rows)} rows, {where.family.special} of them for special tokens, resized to each image"


def image_faults(where: ImagePlaces, record: Record) -> list[str]:
    """Where a patched model of images does not do what its record says."""
    effect = record.scheme.on_images(record.geometry)
    faults = _rotation_faults(where, effect) + _table_faults(where, effect)
    if where.biases:
        faults.append(f"{len(where.biases)} relative position biases are back")
    promised = effect.own.image_size if effect.own is not None else None
    if pair(where.config.image_size) != pair(record.original["image_size"] if promised is None else promised):
        faults.append(f"config.image_size is {where.config.image_size}, which is not what the scheme means")
    return faults


def _rotation_faults(where: ImagePlaces, effect: ImageEffect) -> list[str]:
    name = attention_of(where.config)
    if effect.rotation is None:
        return [f"the scheme needs no {name!r}"] if name.startswith(PREFIX) else []
    faults = []
    if not name.startswith(PREFIX):
        faults.append(f"the attention is {name!r}, which drops the scheme; set it to {PREFIX + 'sdpa'!r}")
    hooked = [has_pre_hook(a, before_rotation) for a in where.attentions]
    if not all(hooked):
        faults.append(f"{hooked.count(False)} of {len(hooked)} attention layers have lost their hook")
    if not has_pre_hook(where.root, before_image):
        faults.append("the model has lost the hook that tells its layers the rows and columns")
    return faults + _module_faults(where.root, "posenc_rotation", effect.rotation)


def _table_faults(where: ImagePlaces, effect: ImageEffect) -> list[str]:
    faults = []
    if not has_pre_hook(where.embeddings, before_patches):
        faults.append("the embeddings have lost the hook that lets them take images of any size")
    reads = isinstance(vars(where.embeddings).get(FLAG), GridReader)
    if effect.own is None:
        faults += [] if reads else ["the model reads its own table again"]
        return faults + (_module_faults(where.root, "posenc_table", effect.table) if effect.table is not None else [])
    rows, wanted = table_rows(where.table.module), where.family.special + where.grid[0] * where.grid[1]
    if rows is None or len(rows) != wanted:
        faults.append(f"the table has {0 if rows is None else len(rows)} rows and the config promises {wanted}")
    return faults


def _module_faults(root: Any, name: str, wanted: nn.Module) -> list[str]:
    live: Any = without_copies(getattr(root, name, None))
    if live is None:
        return [f"the base model has lost its {name!r}"]
    theirs = dict(live.named_buffers())
    same = all(key in theirs and torch.equal(theirs[key].cpu(), b) for key, b in wanted.named_buffers())
    if str(live) != str(wanted) or not same:
        return [f"{name!r} is {live}, and the scheme means {wanted}"]
    return []
