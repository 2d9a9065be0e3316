"""Put one candidate after another into a live model, without building or loading it again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..core.effects import Geometry
from ..errors import PosencError, UnsupportedModel
from ..families import Places, places
from ..patching.measure import measure
from ..patching.patch import patch_model, unpatch_model
from ..patching.patch_state import is_patched, unwrap_model
from ..schemes import Scheme

CHANGING = ("dynamic", "longrope")
"""Types of RoPE whose module changes its frequencies while it runs."""


def geometry_of(model: Any, scheme: Scheme) -> Geometry:
    """The sizes of a model. All its layers must share one RoPE."""
    where = _where(model)
    found = list(measure(where, scheme, "extend", None).values())
    if len(found) != 1:
        raise UnsupportedModel(
            f"The layers of this {where.config.model_type!r} model rotate in {len(found)} ways, and a search needs "
            "one that all of them share."
        )
    return found[0]


def _where(model: Any) -> Places:
    if is_patched(unwrap_model(model)):
        raise PosencError("A search starts from the model's own positions: call unpatch_model first.")
    return places(unwrap_model(model))


class LiveRope:
    """Overwrites the frequencies of a live model in place, and restores them."""

    def __init__(self, model: Any):
        where = _where(model)
        if not where.has_rotary:
            raise UnsupportedModel(
                f"A factor for each pair is searched for models that rotate, and this {where.config.model_type!r} "
                "model does not."
            )
        self.sites = [site for stack in where.stacks for site in stack.rotaries]
        kinds = {getattr(site.own, "rope_type", "default") for site in self.sites}
        if not kinds.isdisjoint(CHANGING) or any(set(site.buffers) != {""} for site in self.sites):
            raise UnsupportedModel(
                "A factor for each pair is searched where all layers share one RoPE that does not follow the length; "
                f"this model's is of type {', '.join(sorted(map(str, kinds)))}. Search a scheme's options instead."
            )
        self.before = [(getattr(s.own, s.buffers[""]).clone(), s.own.attention_scaling) for s in self.sites]

    @contextmanager
    def holding(self, factors: tuple[float, ...], attention: float) -> Iterator[None]:
        """The model with each pair slowed by its factor, within a `with` block."""
        try:
            self._write(factors, attention)
            yield
        finally:
            self._restore()

    def _write(self, factors: tuple[float, ...], attention: float) -> None:
        for site, (frequencies, scaling) in zip(self.sites, self.before, strict=True):
            divided = frequencies.double() / torch.tensor(factors, dtype=torch.float64, device=frequencies.device)
            getattr(site.own, site.buffers[""]).copy_(divided)
            site.own.attention_scaling = scaling * attention

    def _restore(self) -> None:
        for site, (frequencies, scaling) in zip(self.sites, self.before, strict=True):
            getattr(site.own, site.buffers[""]).copy_(frequencies)
            site.own.attention_scaling = scaling


@contextmanager
def scheme_in(model: Any, scheme: Scheme) -> Iterator[None]:
    """The model with a scheme, within a `with` block."""
    patch_model(model, scheme, existing="extend")
    try:
        yield
    finally:
        unpatch_model(model)
