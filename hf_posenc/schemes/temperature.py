"""The kinds of temperature, an option of every scheme: `temperature="log"`, or with options, `"drope c=0.2"`.

The factors themselves are computed in `core/temperatures.py`. Here are the options of each kind and their defaults.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..core.effects import Geometry, Span
from ..core.ranges import Range
from ..core.temperatures import (
    ConstantTemperature,
    LearnedTemperature,
    LogTemperature,
    SteppedTemperature,
    Temperature,
)
from ..errors import PosencError, UnsupportedCell, suggestion
from .option_checks import CheckedOptions

STRENGTH = Range(0.0, 0.5)
"""The factor of the logarithm. Papers use 0.1 to 0.41; with 0 there is no temperature."""


@dataclass(frozen=True, kw_only=True)
class TemperatureKind(CheckedOptions):
    """A temperature and its options. It replaces a temperature that the model's own code applies."""

    kind: ClassVar[str]
    summary: ClassVar[str]

    def on(self, geometry: Geometry, reach: Span) -> Temperature | None:
        """The module for a model of this geometry; None for no temperature."""
        raise NotImplementedError

    def ranges(self) -> dict[str, Range]:
        """The ranges of the options that a search may tune."""
        return {}

    def options(self) -> str | dict[str, Any]:
        """The value for JSON: the name, or the name with the options that differ from their defaults."""
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        told = {f.name: given[f.name] for f in dataclasses.fields(self) if given[f.name] != f.default}
        return {"kind": self.kind, **told} if told else self.kind


@dataclass(frozen=True, kw_only=True)
class NoTemperature(TemperatureKind):
    """Switches off a temperature that the model's own code applies."""

    kind = "none"
    summary = "1, also where the model has a temperature of its own"

    def on(self, geometry: Geometry, reach: Span) -> None:
        return None


@dataclass(frozen=True, kw_only=True)
class Log(TemperatureKind):
    """Su 2021. `length` defaults to the trained length."""

    kind = "log"
    summary = "max(1, ln n / ln length)"

    length: int | None = None

    def __post_init__(self) -> None:
        self._check_count("length")

    def on(self, geometry: Geometry, reach: Span) -> Temperature:
        length = self.length or geometry.trained_length
        if length < 2:
            raise PosencError(
                "temperature 'log' divides by the logarithm of the trained length: it must be 2 or more."
            )
        return LogTemperature(length)


@dataclass(frozen=True, kw_only=True)
class Llama4(TemperatureKind):
    """The temperature of Llama 4's layers without RoPE (`floor_scale` and `attn_scale` in its config)."""

    kind = "llama4"
    summary = "1 + beta ln(1 + floor(n / floor))"

    floor: int = 8192
    beta: float = 0.1

    def __post_init__(self) -> None:
        self._check_count("floor")
        self._check_number("beta", least=0.0)

    def ranges(self) -> dict[str, Range]:
        return {"beta": STRENGTH}

    def on(self, geometry: Geometry, reach: Span) -> Temperature:
        return SteppedTemperature(float(self.beta), self.floor, 0)


@dataclass(frozen=True, kw_only=True)
class Ministral(TemperatureKind):
    """Ministral 3's temperature, with the keys of its `rope_parameters`. The length defaults to the trained one."""

    kind = "ministral"
    summary = "1 + beta ln(1 + floor(position / length))"

    llama_4_scaling_beta: float = 0.1
    original_max_position_embeddings: int | None = None

    def __post_init__(self) -> None:
        self._check_count("original_max_position_embeddings")
        self._check_number("llama_4_scaling_beta", least=0.0)

    def ranges(self) -> dict[str, Range]:
        return {"llama_4_scaling_beta": STRENGTH}

    def length(self, geometry: Geometry) -> int:
        own = (geometry.rope or {}).get("original_max_position_embeddings")
        return int(self.original_max_position_embeddings or own or geometry.trained_length)

    def on(self, geometry: Geometry, reach: Span) -> Temperature:
        return SteppedTemperature(float(self.llama_4_scaling_beta), self.length(geometry), 1)


@dataclass(frozen=True, kw_only=True)
class Drope(TemperatureKind):
    """DroPE (Sakana AI 2025): one number for all queries, from the ratio of target and trained length.

    The authors use c = 0.103 for a trained SmolLM, and 0.412 for their own model.
    """

    kind = "drope"
    summary = "1 + c ln(target length / trained length)"

    c: float = 0.103

    def __post_init__(self) -> None:
        self._check_number("c", least=0.0)

    def ranges(self) -> dict[str, Range]:
        return {"c": STRENGTH}

    def on(self, geometry: Geometry, reach: Span) -> Temperature:
        if reach.factor is None:
            raise PosencError(
                "temperature 'drope' is computed from the target length, which is not given. Give target_length= (the "
                f"model was trained at {geometry.trained_length}) or factor=."
            )
        return ConstantTemperature(1 + self.c * math.log(reach.factor))


@dataclass(frozen=True, kw_only=True)
class Ssmax(TemperatureKind):
    """Scalable softmax (Nakanishi 2025). By default s starts where the mean of s ln n over the trained length is 1."""

    kind = "ssmax"
    summary = "s ln n, s of each head trained"

    start: float | None = None

    def __post_init__(self) -> None:
        self._check_number("start", above=0.0)

    def on(self, geometry: Geometry, reach: Span) -> Temperature:
        length = geometry.trained_length
        if self.start is None and length < 2:
            raise PosencError(
                "temperature 'ssmax' starts from the trained length, which must be 2 or more: give start=."
            )
        return LearnedTemperature(geometry.num_heads, self.start or length / math.lgamma(length + 1))


KINDS: dict[str, type[TemperatureKind]] = {
    cls.kind: cls for cls in (NoTemperature, Log, Llama4, Ministral, Drope, Ssmax)
}


def temperature_from(given: object) -> TemperatureKind | None:
    """A temperature as users and checkpoints write it: a name, a dictionary with options, or both in one text."""
    if given is None or isinstance(given, TemperatureKind):
        return given
    if isinstance(given, str):
        given = _parse(given)
    if not isinstance(given, Mapping) or not isinstance(given.get("kind"), str):
        raise PosencError(
            f"temperature={given!r} is not valid. Give a name, as in temperature='log', or a name with options, as in "
            f"'drope c=0.2' or {{'kind': 'drope', 'c': 0.2}}. Known: {', '.join(KINDS)}."
        )
    cls = KINDS.get(given["kind"])
    if cls is None:
        raise PosencError(f"Unknown temperature {given['kind']!r}.{suggestion(given['kind'], list(KINDS))}")
    options = {key: value for key, value in given.items() if key != "kind"}
    known = [field.name for field in dataclasses.fields(cls)]
    for key in options:
        if key not in known:
            raise PosencError(f"The temperature {cls.kind!r} has no option {key!r}.{suggestion(key, known)}")
    return cls(**options)


def _parse(text: str) -> dict[str, Any]:
    """The dictionary for a text such as `drope c=0.2`."""
    name, *pairs = text.split() or [""]
    found: dict[str, Any] = {"kind": name}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise PosencError(f"An option of a temperature is name=value, as in 'drope c=0.2'; got {pair!r}.")
        try:
            found[key] = json.loads(value)
        except json.JSONDecodeError:
            found[key] = value
    return found


def refuse_images(axes: int) -> None:
    if axes > 1:
        raise UnsupportedCell("A temperature follows the length of a text, and this model reads images: leave it out.")
