"""`patch_model` and `unpatch_model`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from transformers import PreTrainedModel

from ..compat.models import carries_adapters
from ..compat.pytorch import is_compiled
from ..errors import PosencError, UnsupportedModel, suggestion
from ..families import image_places, places
from ..runtime.renderings import RENDERINGS
from ..schemes import Scheme, scheme_from
from .edits import Journal
from .embedders import inner_model, is_embedder, length_edit
from .measure import measure
from .plan import plan
from .plan_images import measure_images, plan_images

M = TypeVar("M")
EXISTING = ("extend", "replace")


def patch_model(
    model: M,
    scheme: str | Scheme,
    *,
    target_length: int | None = None,
    factor: float | None = None,
    trained_length: int | None = None,
    existing: str | None = None,
    layer_types: Sequence[str] | str | None = None,
    **options: Any,
) -> M:
    """Replace, in place, how `model` (or the model inside a SentenceTransformer) knows positions, and return it.

    `scheme` is a name (see `hf-posenc schemes`) or a scheme object; `options` are those of the scheme. One of
    `target_length` and `factor` says how far to reach; `trained_length` corrects a config that is wrong about it.
    A RoPE that is scaled already is extended from where it stands (`existing="extend"`, the default, with a warning
    unless given) or dropped for the plain RoPE below it (`existing="replace"`). Where a model keeps RoPE parameters
    per type of layer, layers with a sliding window are left alone; `layer_types` names others, or "all". A patched
    model is patched anew from its original. A SentenceTransformer is also let read as far as it is told to reach. On a
    model of images the rows and columns of each image are its positions, and lengths make no sense. Whatever raises
    leaves the model as it was.
    """
    inner = inner_model(model)
    refuse_unpatchable(inner)
    lengths = {"target_length": target_length, "factor": factor, "trained_length": trained_length}
    chosen = scheme_from(scheme, {**lengths, **options})
    if existing is not None and existing not in EXISTING:
        raise PosencError(f"existing={existing!r} is not a choice.{suggestion(existing, list(EXISTING))}")
    before = journal_of(inner)
    if before is not None:
        before.undo()
    try:
        journal = _planned(model, inner, chosen, existing, layer_types, before.final if before else None)
        journal.apply()
    except BaseException:
        if before is not None:
            before.apply()
        raise
    return model


def _planned(
    model: Any, inner: PreTrainedModel, scheme: Scheme, existing: str | None, layer_types: Any, lost: str | None
) -> Journal:
    images = image_places(inner)
    if images is not None:
        return plan_images(images, scheme, measure_images(images, scheme, existing, layer_types), lost=lost)
    where = places(inner)
    geometries = measure(where, scheme, existing, layer_types)
    journal = plan(where, scheme, geometries, lost=lost)
    reach = scheme.span(next(iter(geometries.values())))
    if is_embedder(model) and reach.factor is not None:  # nobody who was not told further cuts texts later
        journal.edits = [*journal.edits, length_edit(model, reach.target)]
    return journal


def unpatch_model(model: M) -> M:
    """Give `model` its own positions back, to the last bit, and return it."""
    inner = inner_model(model)
    refuse_unpatchable(inner)
    journal = journal_of(inner)
    if journal is None:
        raise PosencError("This model is not patched: there is nothing to undo. Its positions are its own.")
    if journal.final is not None:
        raise PosencError(f"The patch cannot be undone: {journal.final}.")
    journal.undo()
    return model


def set_rendering(model: Any, rendering: str | None) -> None:
    """Choose how a patched model adds its bias to attention; None lets each call take the cheapest way that fits."""
    if rendering is not None and rendering not in RENDERINGS:
        raise PosencError(f"Unknown rendering {rendering!r}.{suggestion(rendering, list(RENDERINGS))}")
    links = [vars(module).get("posenc_link") for module in model.modules()]
    biased = [link for link in links if link is not None and link.root is not None and link.bias is not None]
    if not biased:
        raise PosencError("This model adds no bias to attention: there is nothing to choose.")
    for link in biased:
        link.shared.rendering = rendering


def is_patched(model: Any) -> bool:
    return journal_of(inner_model(model)) is not None


def journal_of(model: PreTrainedModel) -> Journal | None:
    return getattr(model.base_model, "posenc_journal", None)


def refuse_unpatchable(model: Any) -> None:
    """Raise for what only looks like a model that can be patched."""
    if carries_adapters(model):
        raise UnsupportedModel(
            f"{type(model).__name__} carries PEFT adapters. Patch the base model first, then wrap it: "
            "patch_model(base, ...); get_peft_model(base, ...)."
        )
    if is_compiled(model):
        raise UnsupportedModel("This is a compiled model. Patch the model first, then torch.compile it.")
    refuse_strangers(model)
    meta = [name for name, p in model.named_parameters() if p.device.type == "meta"]
    if meta:
        raise UnsupportedModel(
            f"{len(meta)} parameters of this model are on the meta device ({meta[0]}, ...), so that it has no weights "
            "to work with. Load the weights first (without device_map offloading to 'meta'), then patch."
        )


def refuse_strangers(model: Any) -> None:
    """Raise for what is no transformers model."""
    if not isinstance(model, PreTrainedModel):
        inner = getattr(model, "module", None)
        hint = " Patch model.module before it is wrapped." if isinstance(inner, PreTrainedModel) else ""
        raise UnsupportedModel(
            "A transformers PreTrainedModel or a SentenceTransformer is wanted, got "
            f"{type(model).__module__}.{type(model).__qualname__}.{hint}"
        )
