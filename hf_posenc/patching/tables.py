"""The table site: vectors of places that are added to the input.

They are rendered in three ways: in the place of a text model's own table; before the first layer of a text model that
has none; and read by the embeddings of a vision model, at the size of each image.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..compat.pytorch import has_pre_hook
from ..core.effects import ComputedSource, Effect, Geometry, OwnGrid, OwnTable, TableSource
from ..core.tables import ComputedTable, LastPositions, LearnedTable, ReplacementTable, ZeroTable
from ..errors import UnsupportedCell
from ..families import Stack
from ..families.base import NO_TABLE, UNTOLD
from ..families.places import Site, grid_size
from ..runtime.grids import FLAG, GridReader, before_patches, resize_table
from ..runtime.hooks import before_embeddings, before_first_layer, before_layers
from ..runtime.positions import Link
from .edits import Edit, Hooks, Swap
from .sizes import checkpoint_grid


def live_table(stack: Stack) -> Any:
    """What adds vectors of positions to the input of a text model; None if nothing does."""
    return stack.table.module if stack.table is not None else getattr(stack.root, "posenc_table", None)


def table_edits(
    stack: Stack, effect: Effect, geometry: Geometry, size: Any, rows: int, sealed: bool, loaded: bool
) -> list[Edit]:
    """Puts the table that the scheme means in place of the family's own, or removes that.

    `size`: the size of images that the config will say. `rows`: how many positions a text will have. `loaded`: whether
    the stack's table was just loaded from a checkpoint of the patched model.
    """
    if stack.grid:
        assert stack.table is not None
        return _grid_edits(stack, stack.table, effect, geometry, size, sealed, loaded)
    edits: list[Edit] = []
    if stack.embeddings is not None:
        edits.append(Hooks([stack.embeddings], before_embeddings))
        edits.append(Swap(stack.embeddings, "posenc_offset", None if stack.family.makes_positions else stack.offset))
    assert not isinstance(effect.table, OwnGrid)
    if stack.table is not None and _leaves_table_out(stack, stack.table, effect.table, sealed):
        edits.append(Swap(stack.table.owner, stack.table.name, None, beside=stack.weight))
    elif stack.table is not None:
        module = _replacement_table(stack, stack.table, effect.table, rows, sealed, loaded)
        follows = effect.rotation is not None and effect.rotation.follows_length
        if follows or effect.pattern is not None or effect.temperature is not None:
            module.notes = LastPositions()
        edits.append(Swap(stack.table.owner, stack.table.name, module))
    elif effect.table is not None and not isinstance(effect.table, OwnTable):
        edits += _first_layer_edits(stack, effect.table)
    return edits


def _leaves_table_out(stack: Stack, site: Site, source: TableSource | None, sealed: bool) -> bool:
    """Whether the model is to have no table, which its config can say."""
    if stack.family.table_flag is None:
        return False
    return (source is None and not sealed) or (site.module is None and isinstance(source, OwnTable))


def _replacement_table(
    stack: Stack, site: Site, source: TableSource | None, rows: int, sealed: bool, loaded: bool
) -> ReplacementTable:
    """The table that replaces the family's own one."""
    if site.module is None:
        return _first_table(stack, source, sealed)
    native, like = site.module, site.module.weight
    if source is None:
        # One row in a sealed checkpoint: a program that ignores the seal has no use for it, and refuses.
        module: ReplacementTable = ZeroTable(native.embedding_dim, 1 if sealed else rows, like)
    else:
        inner = positions_only(native, stack.offset, native.num_embeddings - (sealed and loaded))
        if isinstance(source, OwnTable) and rows > inner.num_embeddings:
            raise UnsupportedCell(
                f"This scheme keeps the model's own position table, which ends at {inner.num_embeddings}; a "
                f"target of {rows} needs another. Leave target_length out, or resize the table with 'learned'."
            )
        module = source.restore(inner, like) if loaded else source.module(inner, like)
        module.sealed = sealed
    module.replace(native, stack.offset)
    return module


def _first_table(stack: Stack, source: TableSource | None, sealed: bool) -> ReplacementTable:
    """The table for a model that was built without one."""
    like = stack.weight.weight
    stand_in = nn.Embedding(1, like.shape[1], device="meta")
    if source is None:
        module: ReplacementTable = ZeroTable(like.shape[1], 1, like)
    else:
        module = source.module(stand_in if isinstance(source, ComputedSource) else None, like)
        module.sealed = sealed
    module.replace(stand_in, stack.offset)
    return module


def positions_only(native: nn.Embedding, first: int, last: int) -> nn.Embedding:
    """A family's table without the rows that stand for no position."""
    weight = native.weight.detach()[first:last]
    return native if len(weight) == len(native.weight) else nn.Embedding.from_pretrained(weight, freeze=False)


def _first_layer_edits(stack: Stack, source: TableSource) -> list[Edit]:
    """Puts a table before the first layer, which is told positions."""
    first, kind = stack.first_layer, stack.config.model_type
    reason = NO_TABLE.get(kind, UNTOLD if stack.family.bias else None)
    if reason is not None:
        raise UnsupportedCell(f"This scheme cannot add to the input of {kind!r} models: {reason}.")
    if first is None:
        raise UnsupportedCell(
            f"This scheme adds to the input of the first layer, and this {kind!r} model has no list of as many "
            "layers as its config says, to find it in."
        )
    table, link = source.module(None, stack.weight.weight), Link(stack.root)
    return [
        Swap(stack.root, "posenc_table", table),
        Swap(first, "posenc_link", link),
        Swap(stack.root, "posenc_first", link),
        Hooks([first], before_first_layer),
        Swap(stack.root, "posenc_layers", _path_of_layers(stack.root, first)),
        Hooks([stack.root], before_layers),
    ]


def _path_of_layers(root: nn.Module, first: nn.Module) -> str:
    """The name of the list that begins with a layer."""
    lists = ((path, module) for path, module in root.named_modules() if isinstance(module, nn.ModuleList))
    return next(path for path, module in lists if len(module) and module[0] is first)


def _grid_edits(
    stack: Stack, site: Site, effect: Effect, geometry: Geometry, size: Any, sealed: bool, loaded: bool
) -> list[Edit]:
    """Puts a table that the embeddings of a vision model read at the size of each image."""
    source, like = effect.table, stack.weight.weight
    edits: list[Edit] = [Hooks([stack.embeddings], before_patches)]
    if isinstance(source, OwnGrid):  # the model's own code reads and resizes it
        if not loaded:
            edits.append(Swap(site.owner, site.name, _own_grid(stack, site, source, geometry, size)))
        return edits
    edits.append(Swap(stack.embeddings, FLAG, GridReader(stack.root, stack.offset)))
    if source is not None:
        edits.append(Swap(stack.root, "posenc_table", source.module(None, like)))
    if stack.family.table_flag and not sealed:
        return [*edits, Swap(site.owner, site.name, None, beside=stack.weight)]
    rows, columns = checkpoint_grid(geometry) if sealed else grid_size(size, stack.patch)
    # Nothing reads this table. Checkpoints hold it.
    blank = like.new_zeros(stack.offset + rows * columns, geometry.hidden_size)
    return [*edits, Swap(site.owner, site.name, _as_table(blank, site.module, trained=False))]


def _own_grid(stack: Stack, site: Site, own: OwnGrid, geometry: Geometry, size: Any) -> Any:
    native, rows, side = site.module, grid_rows(site.module), grid_size(size, stack.patch)[0]
    if rows is None:
        generator = torch.Generator().manual_seed(own.seed)
        new = torch.randn(stack.offset + side**2, geometry.hidden_size, generator=generator)
        new = (new * geometry.initializer_range).to(stack.weight.weight)
    else:
        new = resize_table(rows, stack.offset, side, stack.family.antialias)
    trained = native.weight if isinstance(native, nn.Embedding) else native
    return _as_table(new, native, trained=trained is None or trained.requires_grad)


def grid_rows(native: Any) -> Tensor | None:
    """The rows (rows, size) of a table that is a parameter or an embedding; None where there is no table."""
    if native is None:
        return None
    rows: Tensor = native.weight if isinstance(native, nn.Embedding) else native[0]
    return rows.detach()


def _as_table(rows: Tensor, native: Any, trained: bool) -> nn.Embedding | nn.Parameter:
    """A table with these rows, an embedding or a parameter as the model's own."""
    if isinstance(native, nn.Embedding):
        return nn.Embedding.from_pretrained(rows, freeze=not trained)
    return nn.Parameter(rows[None], requires_grad=trained)


# --- checks ----------------------------------------------------------------------------------------------------------


def table_faults(stack: Stack, effect: Effect) -> list[str]:
    if stack.grid:
        return _grid_faults(stack, effect)
    if stack.table is None and isinstance(effect.table, OwnTable):
        return []
    faults, first = [], stack.first_layer
    if stack.embeddings is not None and not has_pre_hook(stack.embeddings, before_embeddings):
        faults.append("the embeddings have lost their hook")
    added = stack.table is None and effect.table is not None
    if added and first is not None and not has_pre_hook(first, before_first_layer):
        faults.append("the first layer has lost the hook that adds positions")
    own = live_table(stack)
    inner: Any = getattr(own, "original_module", own)  # peft keeps trained copies behind a wrapper
    if inner is None:
        return [*faults, "the position table of the scheme is missing"] if effect.table is not None else faults
    if not isinstance(inner, (ComputedTable, LearnedTable)):
        return [*faults, f"the position table is a {type(inner).__name__}, not the one that the patch put there"]
    wanted = _wanted_table(stack, effect, inner)
    if str(wanted) != str(inner) or not _same_buffers(wanted, inner):
        faults.append(f"the position table is {inner}, and the scheme means {wanted}")
    promise = getattr(stack.config, stack.family.length, None)
    rows = inner.offset if stack.family.counted else 0
    if isinstance(inner, LearnedTable) and inner.num_embeddings - inner.offset + rows != (promise or 0) > 0:
        faults.append(f"the table has {inner.num_embeddings} rows and the config promises {promise}")
    return faults


def _wanted_table(stack: Stack, effect: Effect, inner: Any) -> nn.Module:
    like = inner.weight if isinstance(inner, LearnedTable) else inner.anchor
    if effect.table is None:
        return ZeroTable(inner.size if isinstance(inner, ComputedTable) else inner.embedding_dim, None, like)
    assert not isinstance(effect.table, OwnGrid)
    stand_in: nn.Embedding | None = None
    if isinstance(inner, LearnedTable) and stack.table is not None:
        stand_in = inner
    elif stack.table is not None:
        stand_in = nn.Embedding.from_pretrained(like.new_zeros(1, inner.size))
    wanted: nn.Module = effect.table.restore(stand_in, like)
    return wanted


def _same_buffers(wanted: nn.Module, live: nn.Module) -> bool:
    theirs = dict(live.named_buffers())
    return all(
        name in theirs and torch.equal(buffer, theirs[name].to(buffer.device))
        for name, buffer in wanted.named_buffers()
    )


def _grid_faults(stack: Stack, effect: Effect) -> list[str]:
    faults = []
    assert stack.table is not None
    if not has_pre_hook(stack.embeddings, before_patches):
        faults.append("the embeddings have lost the hook that lets them take images of any size")
    source = effect.table
    if not isinstance(source, OwnGrid):
        if not isinstance(vars(stack.embeddings).get(FLAG), GridReader):
            faults.append("the model reads its own table again")
        if source is not None:
            faults += module_faults(stack.root, "posenc_table", source.module(None, stack.weight.weight))
        return faults
    rows, columns = stack.grid
    found, wanted = grid_rows(stack.table.module), stack.offset + rows * columns
    if found is None or len(found) != wanted:
        faults.append(f"the table has {0 if found is None else len(found)} rows and the config promises {wanted}")
    return faults


def module_faults(root: Any, name: str, wanted: nn.Module) -> list[str]:
    """Where a module that a patch put on the model is not the one that the scheme means."""
    live: Any = getattr(root, name, None)
    live = getattr(live, "original_module", live)  # peft keeps trained copies behind a wrapper
    if live is None:
        return [f"the base model has lost its {name!r}"]
    if str(live) != str(wanted) or not _same_buffers(wanted, live):
        return [f"{name!r} is {live}, and the scheme means {wanted}"]
    return []


def table_words(stack: Stack) -> str:
    """What adds vectors to the input, in the words of `describe`."""
    if not stack.grid:
        table = live_table(stack)
        return "none" if table is None else str(table)
    if isinstance(vars(stack.embeddings).get(FLAG), GridReader):
        return str(getattr(stack.root, "posenc_table", "none"))
    rows = grid_rows(stack.table.module) if stack.table is not None else None
    if rows is None:
        return "none"
    return f"{len(rows)} rows, {stack.offset} of them for special tokens, resized to each image"
