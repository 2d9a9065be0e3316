"""Where positions enter the models of a family: data, checked against the live model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from ..errors import PosencError
from ..registry import Plugins, Registry

PLUGINS = Plugins("hf_posenc.families")
FAMILIES: Registry[Family] = Registry("family", PLUGINS)
GENERIC = "rotary"
"""The family that serves every RoPE model whose type no other family names."""
REFUSED: dict[str, str] = {}
"""Model types that cannot be patched, and the reasons."""
NO_TABLE: dict[str, str] = {}
"""Model types without a table that cannot be given one, and the reasons."""
UNTOLD = "its layers are not told positions"
TOLD_ONE = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_vl_moe_text", "qwen3_vl_text")
"""Model types with M-RoPE whose layers are also told one position for each token of a text, besides the three."""
SEVERAL = ("neomme",)
"""Model types with M-RoPE whose rotary modules have no `mrope_section`."""
STATES_FIRST = ("gemma3n_text",)
"""Model types whose layers carry several states for each token, in an axis in front of the batch."""


def no_rows(config: Any) -> int:
    return 0


def one_row(config: Any) -> int:
    return 1


@dataclass(frozen=True, kw_only=True)
class Family:
    """Paths start at a stack. Attention layers and rotary modules are found by what they do, and need no paths."""

    name: str
    model_types: tuple[str, ...] = ()
    """Empty for the generic family, which serves every model that has the rotary modules it looks for."""
    positions: str
    """What the family's own positions are, in a few words."""
    since: tuple[int, int] = (0, 0)
    """The first release of transformers that builds the model as described here."""
    axes: tuple[str, ...] = ("position",)
    """The names of a token's coordinates."""
    part: tuple[str, str] | None = None
    """For models with several parts: the path of the part that this family describes (`vision_model`), and the section
    of the config about it (`vision_config`)."""
    stacks: tuple[str, ...] = ("",)
    """Paths of the stacks of layers, from the base model (`model.base_model`) or from the part of it above. Paths that
    a model does not have are skipped, so that a decoder alone is served as well as an encoder with a decoder."""
    length: str = "max_position_embeddings"
    """The key in the config for how long a text may be, or how large an image is."""

    rotary: bool = False
    """Whether modules that `config.rope_parameters` describes rotate q and k."""
    table: str | None = None
    """The path of the position table, for families that have one: an embedding or, on some vision models, a
    parameter."""
    table_flag: str | None = None
    """The key in the config for whether there is a table; None where there always is one."""
    offset: Callable[[Any], int] = no_rows
    """How many rows of the table come before the row of position 0, computed from the config."""
    counted: bool = False
    """Whether the length in the config includes those rows."""
    embeddings: str | None = None
    """The path of a module that takes positions or token types from buffers of fixed length, and must be given them as
    arguments instead; on vision models the path of the module that reads the table."""
    makes_positions: bool = False
    """Whether that module counts positions by itself, so that it needs token types only."""
    switch: tuple[str, str] | None = None
    """A flag in the config, and the attribute of a stack that it sets. It replaces the positions above by another
    kind; a patch turns it off."""
    bias: str | None = None
    """The name of the argument that gives attention layers the family's own position bias."""
    blank: Callable[[Any], Any] = staticmethod(lambda value: None)  # noqa: RUF009
    """Makes, from the value of that argument, the value that means no bias."""
    biases: tuple[str, ...] = ()
    """Names of attributes, on any module, that hold a position bias which the family can be built without."""
    bias_flags: tuple[str, ...] = ()
    """The flags in the config that switch these on."""

    patches: str | None = None
    """The path of the convolution that cuts an image into patches, on vision models."""
    registers: str | None = None
    """The key in the config for how many tokens before the patches have no row in the table."""
    antialias: bool = False
    """Whether the family's own code resizes its table to an image with antialiasing."""

    @cached_property
    def flags(self) -> tuple[str, ...]:
        """The flags in a config that say which positions a model of this family has."""
        return (*self.bias_flags, *filter(None, [self.table_flag]), *(self.switch or ())[:1])


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
"""A family that reads an image as rows and columns of patches after a class token, which has a row in the table."""


def register_family(family: Family) -> Family:
    """Let this package serve models of the family's types by what the family says.

    From outside this package: call this in a module, and name that module in the entry points of your package, in the
    group `hf_posenc.families`, under the family's name. Or import the module before you patch a model of its types.
    """
    module = _caller()
    fault = _fault(family)
    if fault is not None:
        raise PosencError(f"{getattr(family, 'name', family)!r} cannot be registered as a family: {fault}.")
    return FAMILIES.add(family.name, family, module)


def _fault(family: Any) -> str | None:
    """Why this cannot be registered beside the families that there are; None if it can."""
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
    """The name of the module that called the caller of this function."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None and frame.f_back.f_back is not None
    return str(frame.f_back.f_back.f_globals["__name__"])


def family_of(kind: Any) -> Family | None:
    """The family that names a model type; None where no family does, so that only the generic family may serve it.

    Raises where a package offers the type and cannot be imported.
    """
    if isinstance(kind, str):
        PLUGINS.load(kind)
        PLUGINS.load_all()
    for family in FAMILIES.registered().values():
        if kind in family.model_types:
            return family
    return None


def refuse(reason: str, *model_types: str) -> None:
    """Register model types that cannot be patched, with the reason."""
    REFUSED.update(dict.fromkeys(model_types, reason))
