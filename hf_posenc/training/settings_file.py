"""Read a recipe and its overrides on the command line, `--section.key=value`, strictly."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ..errors import PosencError, suggestion
from .recipe_files import recipe_path
from .settings import Settings
from .settings.values import models_of


def complete_settings(stored: Any) -> Any:
    """Settings stored by `of_run`, with keys that later releases added."""
    try:
        return json.loads(json.dumps(Settings.model_validate({**stored, "output": ""}).of_run()))
    except (TypeError, ValidationError):
        return stored


def read_settings(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Settings:
    """The settings of a recipe, by name or file, with overrides such as `--data.length=4096`."""
    try:
        raw = yaml.load(recipe_path(path).read_text(encoding="utf-8"), Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise PosencError(f"{os.fspath(path)} is not YAML: {error}") from None
    if not isinstance(raw, dict):
        raise PosencError(f"{os.fspath(path)} should map sections (model, scheme, data ...) to values.")
    for given in overrides:
        _override(raw, given)
    try:
        return Settings.model_validate(raw)
    except ValidationError as error:
        problems = "\n".join(f"  {_problem_message(problem)}" for problem in error.errors())
        raise PosencError(
            f"The recipe {os.fspath(path)}, with the options of the command line, is not valid:\n{problems}"
        ) from None


class _Loader(yaml.SafeLoader):
    """Reads 1e-3 as a number, which YAML 1.1 takes for text since it lacks a dot."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)


def _override(raw: dict[str, Any], given: str) -> None:
    """Set one `--a.b=value` in nested settings. The value is YAML, as in the file."""
    name, equals, text = given.removeprefix("--").partition("=")
    if not given.startswith("--") or not equals or not name:
        raise PosencError(f"{given!r} is not understood: write --section.key=value, for example --data.length=4096.")
    *sections, key = name.split(".")
    at: Any = raw
    for section in sections:
        if at.get(section) is None:
            at[section] = {}
        at = at[section]
        if not isinstance(at, dict):
            raise PosencError(f"{given!r}: {section} is a value, not a section.")
    try:
        at[key] = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise PosencError(f"{given!r}: the value is not YAML ({error}).") from None


def _problem_message(problem: ErrorDetails) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        *sections, key = problem["loc"]
        known = list(_section(sections).model_fields)
        return f"{where}: there is no such key.{suggestion(str(key), known)}"
    if problem["type"] == "missing":
        return f"{where}: is missing"
    if problem["type"] == "value_error":  # one of our own, which says everything
        message = str(problem["ctx"]["error"])
        return f"{where}: {message}" if where else message
    return f"{where}: {problem['msg']}, got {problem['input']!r}" if where else problem["msg"]


def _section(path: Sequence[str | int]) -> type[BaseModel]:
    """The class of a section, by its path of keys."""
    at: type[BaseModel] = Settings
    for key in path:
        field = at.model_fields.get(str(key))
        if field is not None:
            at = next(t for t in models_of(field.annotation))
    return at
