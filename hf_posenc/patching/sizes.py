"""What a config says about how far positions reach and which kinds of positions there are.

How far they reach is the length of a text, or the size of images.
"""

from __future__ import annotations

from typing import Any

import torch

from ..core.effects import Effect, Geometry, OwnGrid, OwnTable, Span
from ..families import Family, Places, Stack
from ..families.places import grid_size, sides
from .edits import Edit, Swap
from .grades import is_sealed


def config_length(where: Places) -> int | None:
    """How many tokens of text the config allows; None where it does not say, and on vision models."""
    length = getattr(where.config, where.family.length, None)
    if len(where.family.axes) > 1 or not isinstance(length, int) or isinstance(length, bool) or length <= 0:
        return None
    return length - rows_before_positions(where)


def rows_before_positions(where: Places) -> int:
    """How many rows before the row of position 0 the length in the config includes."""
    return where.family.offset(where.config) if where.family.counted else 0


def config_size(where: Places, effect: Effect, reach: Span) -> Any:
    """The length, or the size of images, that the config of the patched model says."""
    if len(where.family.axes) == 1:
        kept = config_length(where) if where.has_table and isinstance(effect.table, OwnTable) else None
        return max(reach.target, kept or 0) + rows_before_positions(where)
    given = effect.table.image_size if isinstance(effect.table, OwnGrid) else None
    return getattr(where.config, where.family.length) if given is None else given


def size_edits(where: Places, effect: Effect, size: Any) -> list[Edit]:
    """Writes sizes and kinds of positions into the config, and into modules that hold copies of these values."""
    config, family, edits = where.config, where.family, list[Edit]()
    if hasattr(config, family.length):
        edits.append(Swap(config, family.length, size))
    if family.switch:
        edits.append(Swap(config, family.switch[0], False))
        edits += [Swap(stack.root, family.switch[1], False) for stack in where.stacks]
    flags = dict.fromkeys(family.bias_flags, False)
    if family.table_flag:
        flags[family.table_flag] = effect.table is not None or is_sealed([effect], family)
    edits += [Swap(config, flag, value) for flag, value in flags.items()]
    for stack in where.stacks:
        edits += _module_flag_edits(stack, flags)
        edits += _module_size_edits(stack, size) if stack.grid else []
    return edits


def _module_flag_edits(stack: Stack, flags: dict[str, bool]) -> list[Edit]:
    """Sets the flags that modules have copied from the config when they were built."""
    noted = ((module, flag) for module in stack.root.modules() for flag in flags)
    return [Swap(module, flag, flags[flag]) for module, flag in noted if isinstance(vars(module).get(flag), bool)]


def _module_size_edits(stack: Stack, size: Any) -> list[Edit]:
    """Sets the sizes that the embeddings of a vision model have copied from the config."""
    height, width = sides(size)
    rows, columns = grid_size(size, stack.patch)
    counts = {"num_patches": rows * columns, "num_positions": stack.offset + rows * columns}
    edits: list[Edit] = [Swap(stack.root, "posenc_patch", stack.patch)]
    for holder in filter(None, (stack.embeddings, getattr(stack.embeddings, "patch_embeddings", None))):
        if hasattr(holder, "image_size"):
            edits.append(Swap(holder, "image_size", height if isinstance(holder.image_size, int) else (height, width)))
        edits += [Swap(holder, name, count) for name, count in counts.items() if hasattr(holder, name)]
    if hasattr(stack.embeddings, "position_ids"):
        ids = torch.arange(counts["num_positions"], device=stack.embeddings.position_ids.device)
        edits.append(Swap(stack.embeddings, "position_ids", ids[None]))
    return edits


def size_faults(where: Places, effect: Effect, reach: Span, original: dict[str, Any]) -> list[str]:
    """Where the config has another size than the patch wrote. The length of a text may be changed by hand."""
    if len(where.family.axes) == 1:
        return []
    name, given = where.family.length, getattr(effect.table, "image_size", None)
    found = getattr(where.config, name)
    if sides(found) != sides(original[name] if given is None else given):
        return [f"config.{name} is {found}, which is not what the scheme means"]
    return []


def checkpoint_size(family: Family, config: Any, effects: list[Effect], geometry: Geometry, reach: Span) -> Any:
    """The size of the table in a checkpoint, as the config would say it; None where the config is right.

    A sealed table has another size than the config says, so that whoever forces the seal is refused: no row, one too
    many, or one patch.
    """
    sealed = is_sealed(effects, family)
    if len(family.axes) > 1:
        return _side(checkpoint_grid(geometry), geometry.patch) if sealed else None
    counted, target = family.offset(config) if family.counted else 0, reach.target
    if any(isinstance(effect.table, OwnTable) for effect in effects):  # such a table keeps all its rows
        target = max(target, getattr(config, family.length) - counted)
    rows = 1 if sealed and all(effect.table is None for effect in effects) else target + sealed
    return rows + counted


def checkpoint_grid(geometry: Geometry) -> tuple[int, ...]:
    """Rows and columns of the table in a sealed checkpoint, which differ from those that its config says."""
    return (2, 2) if geometry.grid == (1, 1) else (1, 1)


def _side(grid: tuple[int, ...], patch: tuple[int, ...]) -> Any:
    height, width = (rows * step for rows, step in zip(grid, patch, strict=True))
    return height if height == width else [height, width]
