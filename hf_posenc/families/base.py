"""Where positions enter the models of a family: data, checked against the live model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..errors import PosencError
from ..registry import Plugins, Registry

PLUGINS = Plugins("hf_posenc.families")
FAMILIES: Registry[Family] = Registry("family", PLUGINS)
GENERIC = "rotary"
"""The family that serves whatever has what it looks for."""
REFUSED: dict[str, str] = {}
"""Model types that cannot be patched, and why."""
NO_TABLE: dict[str, str] = {}
"""Model types without a table that cannot be given one, and why."""
UNTOLD = "its layers are not told positions"
TOLD_ONE = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_vl_moe_text", "qwen3_vl_text", "qwen4_exp_text")
"""Model types with M-RoPE whose layers are told one position for each token of a text as well, beside the three."""
STATES_FIRST = ("gemma3n_text",)
"""Model types whose layers carry several states for each token in front of the batch, not before the channels."""


def no_rows(config: Any) -> int:
    return 0


def one_row(config: Any) -> int:
    return 1


@dataclass(frozen=True, kw_only=True)
class Family:
    """Paths are from a stack; attention layers and rotary modules are found by what they do."""

    name: str
    model_types: tuple[str, ...] = ()
    """None for the generic family, which serves whatever has what it looks for."""
    positions: str
    """What the family's own positions are, in a word."""
    since: tuple[int, int] = (0, 0)
    """The release of transformers from which on the model is built as said here."""
    axes: tuple[str, ...] = ("position",)
    """The coordinates of a token, each by its name."""
    part: tuple[str, str] | None = None
    """For models that have other parts as well: where the one is that this is about (`vision_model`), and which
    section of the config speaks of it (`vision_config`)."""
    stacks: tuple[str, ...] = ("",)
    """Paths of the stacks of layers from the base model (`model.base_model`) or the part of it above; those that a
    model has not are passed over, so that a decoder alone is served as well as an encoder and a decoder."""
    length: str = "max_position_embeddings"
    """The config's name for how long a text may be, or how large an image is."""

    rotary: bool = False
    """Whether q and k are rotated, by modules that `config.rope_parameters` describes."""
    table: str | None = None
    """The position table, for families that have one: an embedding or, on vision models, also a parameter."""
    table_flag: str | None = None
    """The config's name for whether there is a table; None where there always is."""
    offset: Callable[[Any], int] = no_rows
    """How many rows of the table stand before that of position 0, by the config."""
    counted: bool = False
    """Whether the length in the config counts those rows."""
    embeddings: str | None = None
    """A module that takes positions or token types from buffers of fixed length, and must be given them instead; on
    vision models the one that reads the table."""
    makes_positions: bool = False
    """Whether that module counts positions by itself, and only needs token types."""
    switch: tuple[str, str] | None = None
    """A flag of the config, and the attribute of a stack that it sets, which put another kind of positions in place of
    the one above: a patch turns it off."""
    bias: str | None = None
    """The argument of an attention layer that brings the family's own position bias."""
    blank: Callable[[Any], Any] = staticmethod(lambda given: None)  # noqa: RUF009
    """What that argument is replaced by to bring none."""
    biases: tuple[str, ...] = ()
    """Attributes, of any module, that hold a position bias which the family can be built without."""
    bias_flags: tuple[str, ...] = ()
    """What the config calls them."""

    patches: str | None = None
    """The convolution that cuts an image into patches, on vision models."""
    registers: str | None = None
    """The config's name for how many tokens stand before the patches that have no row of the table."""
    antialias: bool = False
    """Whether the family's own code does so when it resizes its table to an image."""


VisionFamily = partial(
    Family,
    positions="table",
    since=(5, 22),
    axes=("x", "y"),
    length="image_size",
    table="embeddings.position_embeddings",
    embeddings="embeddings",
    patches="embeddings.patch_embeddings.projection",
    offset=one_row,
)
"""A family that reads an image as rows and columns of patches, behind a class token that has a row of the table."""


def register_family(family: Family) -> Family:
    """Make a family known to all that looks at models of its types.

    From outside this package: call this in a module that the entry points of your package name, group
    `hf_posenc.families`, under the family's name; or just import it before a model of its types is looked at.
    """
    module = _caller()
    fault = _fault(family)
    if fault is not None:
        raise PosencError(f"{getattr(family, 'name', family)!r} cannot be registered as a family: {fault}.")
    return FAMILIES.add(family.name, family, module)


def _fault(family: Any) -> str | None:
    """Why something cannot be a family beside those that are."""
    if not isinstance(family, Family):
        return f"a Family is wanted, got {type(family).__name__}"
    if isinstance(family.model_types, str):
        return f"model_types is a tuple, got the text {family.model_types!r}"
    if not family.model_types and family.name != GENERIC:
        return "model_types names none"
    for kind in family.model_types:
        if kind in REFUSED:
            return f"models of type {kind!r} are refused: {REFUSED[kind]}"
        for other in FAMILIES.registered().values():
            if other.name != family.name and kind in other.model_types:
                return f"models of type {kind!r} are served by the family {other.name!r}"
    return None


def _caller() -> str:
    """The module that called the function that called this one."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None and frame.f_back.f_back is not None
    return str(frame.f_back.f_back.f_globals["__name__"])


def family_of(kind: Any) -> Family | None:
    """The family that names a model type; None for one that is served, if at all, by what is found in it.

    A package that promises to serve the type, and cannot be imported, is not passed over: that raises.
    """
    if isinstance(kind, str):
        PLUGINS.load(kind)
        PLUGINS.load_all()
    for family in FAMILIES.registered().values():
        if kind in family.model_types:
            return family
    return None


def refuse(reason: str, *model_types: str) -> None:
    """Say why some model types cannot be patched."""
    REFUSED.update(dict.fromkeys(model_types, reason))
