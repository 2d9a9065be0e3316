"""docs/recipe_keys.md: every key of a recipe in tables, generated from the settings."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from .settings import Settings
from .settings.data import Source
from .settings.values import Length, Lengths, models_of

SIGNS = {"gt": "above", "ge": "from", "lt": "below", "le": "up to"}
"""Bounds of a value, by pydantic's names."""
PLAIN = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def keys_markdown() -> str:
    """A table for each section, and one for each group of keys inside it."""
    return "\n\n".join("\n".join(lines) for lines in _sections(Settings, ""))


def _sections(section: type[BaseModel], path: str) -> Iterator[list[str]]:
    own = [(name, field) for name, field in section.model_fields.items() if path or not models_of(field.annotation)]
    lines = [f"## `{path}`" if path else "## Beside the sections", "", inspect.cleandoc(section.__doc__ or ""), ""]
    lines += ["| key | value | unless given | what it says |", "|---|---|---|---|"]
    inherited = set(Source.model_fields) if path == "data.sources" else set()
    lines += [_line(name, field) for name, field in own if name not in inherited]
    if inherited:
        lines += ["", f"Each also takes {', '.join(f'`{name}`' for name in Source.model_fields)}, as `data` does."]
    yield lines
    for name, field in section.model_fields.items():
        for inner in models_of(field.annotation):
            yield from _sections(inner, f"{path}.{name}".lstrip("."))


def _line(name: str, field: FieldInfo) -> str:
    cells = [f"`{name}`", _values(field), _default(field), " ".join((field.description or "").split())]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "**must be given**"
    if field.default is None or field.default == []:
        return ""
    return "on" if isinstance(field.default, BaseModel) else f"`{_yaml_value(field.default)}`"


def _yaml_value(value: Any) -> str:
    """A value as YAML writes it."""
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _values(field: FieldInfo) -> str:
    marks = [(word, getattr(mark, key, None)) for mark in field.metadata for key, word in SIGNS.items()]
    bounds = [f"{word} {bound:g}" for word, bound in marks if bound is not None]
    kinds = list(dict.fromkeys(_kinds(field.rebuild_annotation())))
    return f"{' or '.join(kinds)}{', ' if bounds else ''}{' and '.join(bounds)}"


def _kinds(kind: Any) -> list[str]:
    inner, origin = get_args(kind), get_origin(kind)
    if origin is Annotated:
        return _number_kinds(inner[0], set(inner[1:]))
    if origin in (Union, types.UnionType):
        return [word for part in inner if part is not types.NoneType for word in _kinds(part)]
    if origin is Literal:
        return [f"`{word}`" for word in inner]
    if origin is list:
        return [f"a list of {word}" for word in _kinds(inner[0])]
    if origin is dict:
        return ["keys and values"]
    return ["keys of its own"] if models_of(kind) else [PLAIN[kind]]


def _number_kinds(kind: Any, marks: set[Any]) -> list[str]:
    """A number with bounds, or a length, which is one that may be written as 4k."""
    if marks & set(get_args(Lengths)[1:]):
        return ["lengths (4096 or 4k)"]
    return ["tokens (4096 or 4k)"] if marks & set(get_args(Length)[1:]) else _kinds(kind)
