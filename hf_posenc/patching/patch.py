"""`patch_model` and `unpatch_model`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from ..errors import PosencError, suggestion
from ..runtime.renderings import RENDERINGS
from ..schemes import Scheme
from ..schemes.plans import scheme_or_plan
from .configs import places_to_patch
from .edits import Edit
from .embedders import length_edit
from .patch_state import journal_of, links, model_to_patch
from .plan import fit, plan
from .records import Geometries
from .untrained import warn_untrained

M = TypeVar("M")
EXISTING = ("extend", "replace")


def patch_model(
    model: M,
    scheme: str | Scheme | Mapping[Any, Any] | Sequence[Any],
    *,
    target_length: int | None = None,
    factor: float | None = None,
    trained_length: int | None = None,
    existing: str | None = None,
    layer_types: Sequence[str] | str | None = None,
    **options: Any,
) -> M:
    """Replace, in place, how `model` (or the model inside a SentenceTransformer) knows positions, and return it.

    `scheme` is a name (see `hf-posenc schemes`) or a scheme object; `options` are those of the scheme. Or it is a
    plan, groups of layers with a scheme each: `{"every 4th": "none", "rest": ("window", {"window": 4096})}`, or the
    name of one; layers that it leaves out keep the model's own positions. One of
    `target_length` and `factor` says how far to reach; `trained_length` corrects a config that is wrong about it.
    A RoPE that is scaled already is extended from where it stands (`existing="extend"`, the default, with a warning
    unless given) or dropped for the plain RoPE below it (`existing="replace"`). Where a model keeps RoPE parameters
    per type of layer, layers with a sliding window are left alone; `layer_types` names others, or "all". A patched
    model is patched anew from its original. A SentenceTransformer is also let read as far as it is told to reach. On a
    vision model the rows and columns of each image are its positions, and lengths make no sense. An
    `UntrainedWarning` says when the model must be trained before the scheme is any use to it. Whatever raises leaves
    the model as it was.

    What happens, step by step:

    1. The request is read: a scheme checks its options when it is made (`schemes`).
    2. Every place in the live model where positions enter is found (`families.places`), and the configs, which other
       models may share, are copied (`configs`).
    3. The geometry of the model is measured: the numbers that a scheme computes with (`measure`).
    4. The scheme's effect on that geometry becomes a journal of edits, site by site (`plan`).
    5. The journal is applied, all of it or nothing (`edits`).
    """
    inner = model_to_patch(model)
    before = journal_of(inner)
    lengths = {"target_length": target_length, "factor": factor, "trained_length": trained_length}
    request = scheme_or_plan(scheme, {**lengths, **options})
    check_existing(existing)
    journal = None
    try:
        if before is not None:
            before.undo()
        where = places_to_patch(inner)
        fitted, where, geometries = fit(request, where, existing, layer_types)
        journal = plan(where, fitted, geometries, lost=before.final if before else None)
        if inner is not model:
            journal.edits = [*journal.edits, *embedder_edits(model, fitted, geometries)]
        warn_untrained(fitted, where.family, where.config.model_type)
        journal.apply()
    except BaseException:
        if before is not None and not (journal is not None and journal.applied):
            before.apply()
        raise
    if before is not None:
        before.forget()
    return model


def check_existing(existing: str | None) -> None:
    if existing is not None and existing not in EXISTING:
        raise PosencError(f"existing={existing!r} is not a choice.{suggestion(existing, list(EXISTING))}")


def embedder_edits(model: Any, scheme: Scheme, geometries: Geometries) -> list[Edit]:
    """Lets a SentenceTransformer, which cuts texts, read as far as the scheme was told to reach."""
    reach = scheme.span(next(iter(geometries.values())))
    return [] if reach.factor is None else [length_edit(model, reach.target)]


def unpatch_model(model: M) -> M:
    """Give `model` its own positions back, to the last bit, and return it.

    If it was moved or cast meanwhile, what comes back is moved and cast as well, as if it had never been away.
    """
    journal = journal_of(model_to_patch(model))
    if journal is None:
        raise PosencError("This model is not patched: there is nothing to undo. Its positions are its own.")
    if journal.final is not None:
        raise PosencError(f"The patch cannot be undone: {journal.final}.")
    journal.undo()
    journal.forget()
    return model


def set_rendering(model: Any, rendering: str | None) -> None:
    """Choose how a patched model adds its bias to attention; None lets each call take the cheapest way that fits."""
    if rendering is not None and rendering not in RENDERINGS:
        raise PosencError(f"Unknown rendering {rendering!r}.{suggestion(rendering, list(RENDERINGS))}")
    biased = [link for _, link in links(model.modules()) if link.bias is not None]
    if not biased:
        raise PosencError("This model adds no bias to attention: there is nothing to choose.")
    for link in biased:
        link.shared.rendering = rendering
