"""The base class of sections, and lengths such as 4k."""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict

from ...core.lengths import parsed_length, parsed_lengths


def length_of(value: Any) -> Any:
    """A length as on the command line: 4096 or 4k."""
    return parsed_length(value) if isinstance(value, str) else value


def lengths_of(value: Any) -> Any:
    """One length or several, as a list or with commas."""
    if isinstance(value, str):
        return parsed_lengths(value)
    return [value] if isinstance(value, int) else value


Length = Annotated[int, BeforeValidator(length_of)]
Lengths = Annotated[list[Length], BeforeValidator(lengths_of)]


class Section(BaseModel):
    # Strict: "1e-3" in quotes is not a number, and an unknown key is an error. The docstring below a key is its
    # description in docs/recipe_keys.md.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


def models_of(annotation: Any) -> list[type[BaseModel]]:
    """The sections that a key may hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for part in get_args(annotation) for found in models_of(part)]
