"""From a scheme to the edits that it means on a live model of images, site by site."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..core.effects import Geometry, ImageEffect, OwnGrid
from ..errors import PosencError, UnsupportedCell, UnsupportedModel
from ..families.towers import ImagePlaces, pair
from ..runtime import attention as _attention  # noqa: F401  importing registers the attention functions
from ..runtime.grids import FLAG, GridLink, GridReader, before_image, before_patches, before_rotation, resized
from ..runtime.positions import PREFIX
from ..schemes import Scheme
from .edits import Edit, Hook, Journal, Swap
from .records import Record
from .seal import seal_edits
from .sidecar import before_state_dict

LOST = (
    "this model was loaded from a patched checkpoint, which does not hold the table or bias that the model had "
    "before; load the original model instead"
)
TEXT_ONLY = ("target_length", "factor", "trained_length")


def measure_images(
    where: ImagePlaces, scheme: Scheme, existing: str | None, layer_types: Sequence[str] | str | None
) -> Geometry:
    """The geometry of a model of images; what makes sense on text alone raises."""
    given = {name: getattr(scheme, name) for name in TEXT_ONLY}
    for name, value in {**given, "existing": existing, "layer_types": layer_types}.items():
        if value is not None:
            raise PosencError(
                f"{name}={value!r} is about texts, and this {where.config.model_type!r} model reads images, of any "
                "size once it is patched. Leave it out; 'learned' takes image_size= for the size of its table."
            )
    if where.convolution.kernel_size != where.convolution.stride:
        raise UnsupportedModel(f"The patches of this {where.config.model_type!r} model overlap or leave gaps.")
    return Geometry(
        **image_sizes(where),
        trained_length=where.grid[0] * where.grid[1],
        initializer_range=float(getattr(where.config, "initializer_range", 0.02)),
        grid=where.grid,
    )


def image_sizes(where: ImagePlaces) -> dict[str, Any]:
    """The numbers of a geometry that weights are made for."""
    config = where.config
    head = int(where.attentions[0].head_dim)
    return {
        "hidden_size": config.hidden_size,
        "num_heads": config.num_attention_heads,
        "head_dim": head,
        "rotary_dim": head,
        "causal": False,
        "patch": where.patch,
        "layers": len(where.attentions),
    }


def original_values(where: ImagePlaces) -> dict[str, Any]:
    """The config values that a patch replaces, as JSON holds them."""
    flags = (*where.family.bias_flags, *filter(None, [where.family.table_flag]))
    size = where.config.image_size
    return {
        "image_size": list(size) if isinstance(size, tuple) else size,
        **{flag: getattr(where.config, flag) for flag in flags},
    }


def stored_side(geometry: Geometry) -> int:
    """Rows and columns of the table in a sealed checkpoint: not those that its config says, so that it is refused."""
    return 2 if geometry.grid == (1, 1) else 1


def plan_images(
    where: ImagePlaces, scheme: Scheme, geometry: Geometry, *, loaded: Record | None = None, lost: str | None = None
) -> Journal:
    """All edits that the scheme means on this model. Nothing is changed yet. As `render.plan`."""
    effect = scheme.on_images(geometry)
    if lost is not None and effect.own is not None:
        raise PosencError(f"{scheme.name!r} starts from the model's own table: {lost}.")
    record = loaded or Record(scheme, {"": geometry}, original_values(where))
    size = _promised_size(where, effect)
    edits: list[Edit] = _size_edits(where, size, effect.own)
    edits += _bias_edits(where, effect)
    edits += _table_edits(where, effect, geometry, size, loaded is not None)
    edits.append(Swap(where.root, "posenc_patch", where.patch))
    if effect.rotation is not None:
        edits += _attention_edits(where, effect.rotation)
    if effect.sealed:
        edits += seal_edits(where.model, where.convolution.weight)
    edits.append(Swap(where.model.config, "posenc", record.to_dict()))
    edits.append(Hook(where.model, before_state_dict, before="state dict"))
    journal = Journal(edits, final=LOST if loaded is not None else lost)
    edits.append(Swap(where.base, "posenc_journal", journal))
    return journal


def _promised_size(where: ImagePlaces, effect: ImageEffect) -> tuple[int, int]:
    """Height and width of the images that the config will speak of."""
    asked = effect.own.image_size if effect.own is not None else None
    return pair(where.config.image_size if asked is None else asked)


def _size_edits(where: ImagePlaces, size: tuple[int, int], own: OwnGrid | None) -> list[Edit]:
    """The size of images, where the config and the modules note it."""
    edits: list[Edit] = []
    if own is not None and own.image_size is not None:
        edits.append(Swap(where.config, "image_size", own.image_size))
    patches = (size[0] // where.patch[0]) * (size[1] // where.patch[1])
    counts = {"num_patches": patches, "num_positions": where.family.special + patches}
    for holder in filter(None, (where.embeddings, getattr(where.embeddings, "patch_embeddings", None))):
        if hasattr(holder, "image_size"):
            edits.append(Swap(holder, "image_size", size[0] if isinstance(holder.image_size, int) else size))
        edits += [Swap(holder, name, count) for name, count in counts.items() if hasattr(holder, name)]
    if hasattr(where.embeddings, "position_ids"):
        ids = torch.arange(counts["num_positions"], device=where.embeddings.position_ids.device)
        edits.append(Swap(where.embeddings, "position_ids", ids[None]))
    return edits


def _bias_edits(where: ImagePlaces, effect: ImageEffect) -> list[Edit]:
    """Takes relative biases away, and says so in the config, as a model without them is built."""
    edits: list[Edit] = [Swap(site.owner, site.name, None, beside=where.convolution) for site in where.biases]
    edits += [Swap(where.config, flag, False) for flag in where.family.bias_flags]
    if where.family.table_flag:
        needed = effect.sealed or effect.own is not None
        edits.append(Swap(where.config, where.family.table_flag, needed))
    return edits


def _table_edits(
    where: ImagePlaces, effect: ImageEffect, geometry: Geometry, size: tuple[int, int], loaded: bool
) -> list[Edit]:
    site, special = where.table, where.family.special
    edits: list[Edit] = [Hook(where.embeddings, before_patches)]
    weight = where.convolution.weight
    if effect.own is not None:  # read and resized by the model's own code
        made = [] if loaded else [Swap(site.owner, site.name, _own_table(where, effect.own, geometry, size))]
        return edits + made
    edits.append(Swap(where.embeddings, FLAG, GridReader(where.root, special)))
    if effect.table is not None:
        edits.append(Swap(where.root, "posenc_table", effect.table.to(weight.device)))
    if where.family.table_flag and not effect.sealed:
        return [*edits, Swap(site.owner, site.name, None, beside=where.convolution)]
    rows = stored_side(geometry) ** 2 if effect.sealed else (size[0] // where.patch[0]) * (size[1] // where.patch[1])
    # Nothing reads it: it is what checkpoints hold.
    blank = weight.new_zeros(special + rows, geometry.hidden_size)
    return [*edits, Swap(site.owner, site.name, as_table(blank, site.module, trained=False))]


def _own_table(where: ImagePlaces, own: OwnGrid, geometry: Geometry, size: tuple[int, int]) -> Any:
    native, side = where.table.module, size[0] // where.patch[0]
    rows = table_rows(native)
    if rows is None:
        generator = torch.Generator().manual_seed(own.seed)
        made = torch.randn(where.family.special + side**2, geometry.hidden_size, generator=generator)
        made = (made * geometry.initializer_range).to(where.convolution.weight)
    else:
        made = resized(rows, where.family.special, side, where.family.antialias)
    trained = native.weight if isinstance(native, nn.Embedding) else native
    return as_table(made, native, trained=trained is None or trained.requires_grad)


def table_rows(native: Any) -> Tensor | None:
    """The rows of a table that is a parameter, an embedding or not there: (rows, size)."""
    if native is None:
        return None
    rows: Tensor = native.weight if isinstance(native, nn.Embedding) else native[0]
    return rows.detach()


def as_table(rows: Tensor, native: Any, trained: bool) -> nn.Embedding | nn.Parameter:
    """Rows as the kind of table that a model has."""
    if isinstance(native, nn.Embedding):
        return nn.Embedding.from_pretrained(rows, freeze=not trained)
    return nn.Parameter(rows[None], requires_grad=trained)


def _attention_edits(where: ImagePlaces, rotation: nn.Module) -> list[Edit]:
    config, root = where.config, where.root
    kernel = config._attn_implementation
    if kernel not in ("sdpa", "eager"):
        raise PosencError(
            f"This scheme works inside attention, through the 'sdpa' and 'eager' kernels; the model uses {kernel!r}. "
            "Call model.set_attn_implementation('sdpa') first."
        )
    if not where.attentions:
        raise UnsupportedCell(f"No attention layer of this {config.model_type!r} model can be reached.")
    edits: list[Edit] = [Swap(config, "_attn_implementation", PREFIX + kernel), Hook(root, before_image)]
    edits.append(Swap(root, "posenc_rotation", rotation.to(where.convolution.weight.device)))
    for index, attention in enumerate(where.attentions):
        edits.append(Swap(attention, "posenc_link", GridLink(root, index, where.special)))
        edits.append(Hook(attention, before_rotation))
    return edits
