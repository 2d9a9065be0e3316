"""Where positions enter the models of a family: data, checked against the live model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ..errors import PosencError
from ..registry import Origin, Plugins, Registry

F = TypeVar("F", "Family", "ImageFamily")

PLUGINS = Plugins("hf_posenc.families")
FAMILIES: Registry[Family] = Registry("family", PLUGINS)
IMAGE_FAMILIES: Registry[ImageFamily] = Registry("image family", PLUGINS)
GENERIC = "rotary"
"""The family that serves whatever has what it looks for."""
REFUSED: dict[str, str] = {}
"""Model types that cannot be patched, and why."""
NO_TABLE: dict[str, str] = {}
"""Model types without a table that cannot be given one, and why."""
UNTOLD = "its layers are not told positions"
STATES_FIRST = ("gemma3n_text",)
"""Model types whose layers carry several states for each token in front of the batch, not before the channels."""


def no_rows(config: Any) -> int:
    return 0


@dataclass(frozen=True, kw_only=True)
class Family:
    """Paths are from a stack; attention layers and rotary modules are found by what they do."""

    name: str
    model_types: tuple[str, ...] = ()
    """None for the generic family, which serves whatever has what it looks for."""
    positions: str
    """What the family's own positions are, in a word."""
    rotary: bool = False
    """Whether q and k are rotated, by modules that `config.rope_parameters` describes."""
    stacks: tuple[str, ...] = ("",)
    """Paths of the stacks of layers from the base model (`model.base_model`); those that a model has not are passed
    over, so that a decoder alone is served as well as an encoder and a decoder."""
    table: str | None = None
    """The position table, for families that have one."""
    offset: Callable[[Any], int] = no_rows
    """How many rows of the table stand before that of position 0, by the config."""
    counted: bool = False
    """Whether the length in the config counts those rows."""
    embeddings: str | None = None
    """A module that takes positions or token types from buffers of fixed length, and must be given them instead."""
    makes_positions: bool = False
    """Whether that module counts positions by itself, and only needs token types."""
    switch: tuple[str, str] | None = None
    """A flag of the config, and the attribute of a stack that it sets, which put another kind of positions in place of
    the one above: a patch turns it off."""
    length: str = "max_position_embeddings"
    """The config's name for how long a text may be."""
    bias: str | None = None
    """The argument of an attention layer that brings the family's own position bias."""
    blank: Callable[[Any], Any] = staticmethod(lambda given: None)  # noqa: RUF009
    """What that argument is replaced by to bring none."""


@dataclass(frozen=True, kw_only=True)
class ImageFamily:
    """Models that read an image as rows and columns of patches, behind tokens that are no patches."""

    name: str
    model_types: tuple[str, ...]
    wholes: tuple[str, ...] = ()
    """Model types that hold such a model beside other parts, at `vision_model` and `config.vision_config`."""
    positions: str = "table"
    """What the family's own positions are, in a word."""
    table: str = "position_embeddings"
    """The position table in `embeddings`: a parameter, or an embedding."""
    convolution: str = "patch_embeddings.projection"
    """What cuts the image into patches, in `embeddings`."""
    special: int = 1
    """Tokens before the patches that have a row of the table."""
    registers: str | None = None
    """The config's name for how many more there are, which have none."""
    antialias: bool = False
    """Whether the family's own code does so when it resizes the table."""
    biases: tuple[str, ...] = ()
    """Attributes, of any module, that hold a relative position bias."""
    bias_flags: tuple[str, ...] = ()
    """What the config calls them."""
    table_flag: str | None = None
    """The config's name for whether there is a table; None where there always is."""


def register_family(family: F) -> F:
    """Make a family known to all that looks at models of its types.

    From outside this package: call this in a module that the entry points of your package name, group
    `hf_posenc.families`, under the family's name; or just import it before a model of its types is looked at.
    """
    module = _caller()
    fault = _fault(family)
    if fault is not None:
        raise PosencError(f"{getattr(family, 'name', family)!r} cannot be registered as a family: {fault}.")
    if isinstance(family, Family):
        FAMILIES.add(family.name, family, module)
    else:
        IMAGE_FAMILIES.add(family.name, family, module)
    return family


def _fault(family: Any) -> str | None:
    """Why something cannot be a family beside those that are."""
    if not isinstance(family, (Family, ImageFamily)):
        return f"a Family is wanted, got {type(family).__name__}"
    if isinstance(family.model_types, str):
        return f"model_types is a tuple, got the text {family.model_types!r}"
    if not _kinds(family) and family.name != GENERIC:
        return "model_types names none"
    for kind in _kinds(family):
        if kind in REFUSED:
            return f"models of type {kind!r} are refused: {REFUSED[kind]}"
        others: list[Family | ImageFamily] = [*FAMILIES.registered().values(), *IMAGE_FAMILIES.registered().values()]
        for other in others:
            if other.name != family.name and kind in _kinds(other):
                return f"models of type {kind!r} are served by the family {other.name!r}"
    return None


def _kinds(family: Family | ImageFamily) -> tuple[str, ...]:
    return family.model_types if isinstance(family, Family) else (*family.model_types, *family.wholes)


def _caller() -> str:
    """The module that called the function that called this one."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None and frame.f_back.f_back is not None
    return str(frame.f_back.f_back.f_globals["__name__"])


def origin_of(family: Family | ImageFamily) -> Origin:
    """Who registered a family."""
    registry: Registry[Any] = FAMILIES if isinstance(family, Family) else IMAGE_FAMILIES
    return registry.origin(family.name)


def refuse(reason: str, *model_types: str) -> None:
    """Say why some model types cannot be patched."""
    REFUSED.update(dict.fromkeys(model_types, reason))
