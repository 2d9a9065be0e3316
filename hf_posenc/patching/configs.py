"""Configs of a model's own: a patch writes into copies, and does not touch other models made from the same object."""

from __future__ import annotations

import copy
import gc
import sys
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..families import Places, places
from .edits import Edit


class Reference(NamedTuple):
    """A module that holds a config."""

    module: nn.Module
    name: str
    shared: PreTrainedConfig
    own: PreTrainedConfig


@dataclass
class OwnConfigs(Edit):
    """The configs that a model's modules hold exchanged for copies. An edit, which comes before all that write there.

    When it is undone, a copy that differs from what it was made of, since somebody has changed it meanwhile (the
    vocabulary has grown, say), stays with the model.
    """

    references: list[Reference]

    @classmethod
    def of(cls, models: list[PreTrainedModel]) -> OwnConfigs:
        modules = {id(part): part for whole in models for part in whole.modules()}
        held = [
            (m, name, c) for m in modules.values() for name, c in vars(m).items() if isinstance(c, PreTrainedConfig)
        ]
        memo: dict[int, Any] = {}
        return cls([Reference(m, name, config, copy.deepcopy(config, memo)) for m, name, config in held])

    def copy_of(self, config: Any) -> Any:
        """The copy of a config; the config itself if no module holds it."""
        return next((r.own for r in self.references if r.shared is config), config)

    def look(self) -> bool:
        return all(vars(r.module).get(r.name) is r.own for r in self.references)

    def put(self, own: bool) -> None:
        if own or all(is_same_config(r.own, r.shared) for r in self.references):
            for module, name, shared, copied in self.references:
                setattr(module, name, copied if own else shared)


def is_same_config(one: Any, other: Any) -> bool:
    try:
        return type(one) is type(other) and bool(vars(one) == vars(other))
    except Exception:  # whatever is in them that cannot be compared
        return False


def models_around(model: PreTrainedModel) -> list[PreTrainedModel]:
    """The models that this one is a part of, such as the one that has the head: what they save must know of a patch.

    A module does not know who holds it. But if nobody outside the model holds its config, nobody holds the model.
    """
    config = model.config
    inside = sum(value is config for module in model.modules() for value in vars(module).values())
    probe = object()  # which is held by a name and by an argument, as the config is here
    if sys.getrefcount(config) <= inside + sys.getrefcount(probe):
        return []
    alive = gc.get_objects()  # hundreds of thousands: no line of Python is run for each
    models: list[Any] = list(compress(alive, map(_kinds(PreTrainedModel).__contains__, map(type, alive))))
    return [one for one in models if one is not model and any(part is model for part in one.modules())]


def _kinds(cls: Any) -> set[Any]:
    """A class and all that are made of it."""
    return {cls}.union(*map(_kinds, cls.__subclasses__()))


def places_to_patch(model: PreTrainedModel) -> Places:
    """The places of a model that is about to be patched, with configs that are its own."""
    around = models_around(model)  # before anything here holds a config: it counts who does
    found = places(model)  # which refuses configs that cannot be copied
    own = OwnConfigs.of([model, *around])
    stacks = {id(stack): replace(stack, config=own.copy_of(stack.config)) for stack in found.stacks}
    return replace(
        found,
        stacks=list(stacks.values()),
        groups=[replace(group, stack=stacks[id(group.stack)]) for group in found.groups],
        config=own.copy_of(found.config),
        model_config=own.copy_of(model.config),
        own_configs=own,
    )
