"""A patch writes into a model's own copies of its configs: other models may have been made from the same objects."""

from __future__ import annotations

import copy
import gc
import sys
from dataclasses import replace
from itertools import compress
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from ..families import Places, places
from .edits import OwnConfigs, Reference


def places_to_patch(model: PreTrainedModel) -> Places:
    """The places of a model that is about to be patched. Their configs are copies that belong to this model alone."""
    around = models_around(model)  # first: it counts references to the config, and nothing here may hold one yet
    found = places(model)  # which refuses configs that cannot be copied
    configs = copy_configs([model, *around])
    copies = {id(reference.shared): reference.own for reference in configs.references}
    stacks = {id(stack): replace(stack, config=copies.get(id(stack.config), stack.config)) for stack in found.stacks}
    return replace(
        found,
        stacks=list(stacks.values()),
        groups=[replace(group, stack=stacks[id(group.stack)]) for group in found.groups],
        config=copies.get(id(found.config), found.config),
        model_config=copies.get(id(model.config), model.config),
        own_configs=configs,
    )


def models_around(model: PreTrainedModel) -> list[PreTrainedModel]:
    """The models that contain this one, such as the model that has the head: a patch changes what they save.

    A module does not know which modules contain it. But if nothing outside the model holds its config, no other model
    contains it.
    """
    config = model.config
    inside = len([value for module in model.modules() for value in vars(module).values() if value is config])
    probe = object()  # held by a name and by an argument, as the config is here
    if sys.getrefcount(config) <= inside + sys.getrefcount(probe):
        return []
    alive = gc.get_objects()  # hundreds of thousands of objects, so no line of Python runs for each
    models: list[Any] = list(compress(alive, map(_subclasses(PreTrainedModel).__contains__, map(type, alive))))
    return [one for one in models if one is not model and any(part is model for part in one.modules())]


def _subclasses(cls: Any) -> set[Any]:
    """A class and all classes derived from it."""
    return {cls}.union(*map(_subclasses, cls.__subclasses__()))


def copy_configs(models: list[PreTrainedModel]) -> OwnConfigs:
    """The edit that gives every module of these models a copy of the config that it holds."""
    modules = {id(part): part for whole in models for part in whole.modules()}
    held = [(m, name, c) for m in modules.values() for name, c in vars(m).items() if isinstance(c, PreTrainedConfig)]
    memo: dict[int, Any] = {}
    return OwnConfigs([Reference(m, name, config, copy.deepcopy(config, memo)) for m, name, config in held])
