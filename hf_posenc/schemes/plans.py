"""Plans: a scheme for each group of layers.

A plan is a mapping, `{"every 4th": "none", "rest": ("window", {"window": 4096})}`, or the same as one text, `"every
4th: none; rest: window window=4096"`, or the name of a plan from a paper. Layers that no group selects keep the
model's own positions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..core.effects import Effect, Geometry, Span
from ..errors import PosencError, suggestion
from .base import SCHEMES, Scheme, scheme_from

PLAN = "plan"
"""The name of a plan's scheme in a record."""
BY_TYPES, BY_LIST = "layer_types", "no_rope_layers"
"""The config keys that can express a plan: RoPE parameters per layer type, or a list of the layers that rotate."""
REST, OWN = "rest", "own"
WORDS = re.compile(r"every (?P<step>\d+)(?:st|nd|rd|th)(?: from (?P<start>\d+))?|(?P<end>first|last) (?P<count>\d+)")
SLICE = re.compile(r"(-?\d*):(-?\d*)(?::(\d+))?")
SHARED: tuple[str, ...] = ("target_length", "factor", "trained_length", "temperature")
"""Options that may be given once for all parts."""
Selector = Any
"""Selects layers: a text, an index, a sequence of indices, a slice, or a function of a layer's index."""


@dataclass(frozen=True)
class Part:
    """Some layers, and their scheme."""

    name: str
    layers: tuple[int, ...]
    scheme: Scheme

    def options(self) -> dict[str, Any]:
        """The part as a dictionary for JSON."""
        given = {"name": self.name, "layers": list(self.layers), "scheme": self.scheme.name}
        return {**given, "options": self.scheme.options()}


@dataclass(frozen=True, kw_only=True)
class Plan(Scheme):
    """A plan for a given model, with the layers of each part."""

    name = PLAN
    summary = "a scheme for each group of layers"

    parts: tuple[Part, ...] = ()
    by: str | None = None
    """The config key that expresses the whole plan (`BY_TYPES` or `BY_LIST`); None if none can."""

    @property
    def keeps(self) -> tuple[str, ...]:  # type: ignore[override]
        """The kinds that all parts keep."""
        return tuple(kind for kind in self.parts[0].scheme.keeps if all(kind in p.scheme.keeps for p in self.parts))

    def part(self, group: str) -> Scheme:
        found = next((part for part in self.parts if group.partition("/")[0] == part.name), None)
        if found is None:
            raise PosencError(f"The plan has no part {group!r}. Its parts: {', '.join(p.name for p in self.parts)}.")
        return found.scheme

    @property
    def rescales(self) -> bool:  # type: ignore[override]
        return any(part.scheme.rescales for part in self.parts)

    @property
    def has_temperature(self) -> bool:
        return any(part.scheme.has_temperature for part in self.parts)

    @property
    def apart(self) -> bool:
        return self.by is None

    def span(self, geometry: Geometry) -> Span:
        """The span of the part with the longest target."""
        return max((part.scheme.span(geometry) for part in self.parts), key=lambda reach: reach.target)

    def effect(self, geometry: Geometry) -> Effect:
        raise NotImplementedError("a plan has effects by part")

    def theta(self, geometry: Geometry) -> float | None:
        return self.parts[0].scheme.theta(geometry)

    def options(self) -> dict[str, Any]:
        by = {"by": self.by} if self.by else {}
        return {"parts": [part.options() for part in self.parts], **by}

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Plan:
        """The plan of a record, which is checked strictly."""
        parts, by = options.get("parts"), options.get("by")
        known = {"parts"} <= set(options) <= {"parts", "by"} and by in (None, BY_TYPES, BY_LIST)
        if not known or not isinstance(parts, Sequence) or not parts:
            raise PosencError(
                f"The options of a plan are 'parts' and, if its config expresses it, 'by'; got {options!r}. The "
                "record is damaged."
            )
        read = tuple(map(_read_part, parts))
        layers = [index for part in read for index in part.layers]
        if len(set(layers)) < len(layers) or len({part.name for part in read}) < len(read):
            raise PosencError("Two parts of a plan have a layer or a name in common: the record is damaged.")
        return cls(parts=read, by=by)


def _read_part(data: Any) -> Part:
    if not isinstance(data, Mapping) or set(data) != {"name", "layers", "scheme", "options"}:
        raise PosencError(
            f"A part of a plan has name, layers, scheme and options, got {data!r}. The record is damaged."
        )
    name, layers, scheme, options = (data[key] for key in ("name", "layers", "scheme", "options"))
    whole = isinstance(layers, list) and layers and all(type(index) is int and index >= 0 for index in layers)
    if not isinstance(name, str) or not whole or not isinstance(scheme, str) or not isinstance(options, dict):
        raise PosencError(f"A part of a plan has values of the wrong type: {data!r}. The record is damaged.")
    return Part(name, tuple(layers), SCHEMES[scheme].from_options(options))


@dataclass(frozen=True)
class Draft:
    """A plan as the user wrote it, before the model's layers are known."""

    groups: tuple[tuple[Selector, Scheme | None], ...]
    """Selectors of layers with their schemes; None for the model's own positions."""

    def on(self, layers: int, types: Sequence[str]) -> Plan:
        """The plan for a model with this number of layers. `types`: their layer types, if there are several."""
        taken: dict[int, str] = {}
        parts, rest = [], None
        for selector, scheme in self.groups:
            name = _name(selector)
            if selector == REST:
                rest = scheme
                continue
            chosen = _select_layers(selector, layers, types)
            for index in chosen:
                if index in taken:
                    raise PosencError(f"Layer {index} is in two groups of the plan, {taken[index]!r} and {name!r}.")
                taken[index] = name
            if scheme is not None:
                parts.append(Part(name, tuple(chosen), scheme))
        left = [index for index in range(layers) if index not in taken]
        if rest is not None and left:
            parts.append(Part(REST, tuple(left), rest))
        if not parts:
            raise PosencError("This plan gives no layer a scheme: there is nothing to patch.")
        return Plan(parts=tuple(parts))


def _name(selector: Selector) -> str:
    if isinstance(selector, slice):
        text = ":".join("" if n is None else str(n) for n in (selector.start, selector.stop, selector.step))
        return text.removesuffix(":") if selector.step is None else text
    if callable(selector):
        return getattr(selector, "__name__", "chosen").strip("<>")
    if isinstance(selector, Sequence) and not isinstance(selector, str):
        return ",".join(map(str, selector))
    return str(selector).strip().replace("/", "|")


def _select_layers(selector: Selector, layers: int, types: Sequence[str]) -> list[int]:
    """The indices of the selected layers; raises if there are none or the selector does not fit the model."""
    every = range(layers)
    if isinstance(selector, str):
        selector = _parse_selector(selector.strip(), layers, types)
    if isinstance(selector, bool):
        raise PosencError(f"{selector} selects no layers: give an index, a slice, 'every 4th', 'first 2', 'last 2'.")
    if isinstance(selector, int):
        selector = [selector]
    found = (
        list(every[selector]) if isinstance(selector, slice)
        else [index for index in every if selector(index)] if callable(selector)
        else [_check_index(index, layers) for index in selector]
    )  # fmt: skip
    if not found:
        raise PosencError(f"{selector!r} selects none of the {layers} layers.")
    return sorted(set(found))


def _check_index(index: Any, layers: int) -> int:
    if isinstance(index, bool) or not isinstance(index, int) or not -layers <= index < layers:
        raise PosencError(f"{index!r} is not a layer of this model. Its {layers} layers are 0 to {layers - 1}.")
    return index % layers


def _parse_selector(text: str, layers: int, types: Sequence[str]) -> Selector:
    words, cut = WORDS.fullmatch(text), SLICE.fullmatch(text)
    if words and words["step"]:
        step = int(words["step"])
        start = int(words["start"]) if words["start"] else step - 1
        return slice(start, None, max(step, 1))
    if words:
        count = int(words["count"])
        return slice(0, count) if words["end"] == "first" else slice(max(layers - count, 0), None)
    if cut:
        return slice(*(int(n) if n else None for n in cut.groups()))
    if re.fullmatch(r"-?\d+([, ]+-?\d+)*", text):
        return [int(n) for n in re.findall(r"-?\d+", text)]
    if text in types:
        return [index for index, kind in enumerate(types) if kind == text]
    known = ["every 4th", "first 4", "last 4", REST, *dict.fromkeys(types)]
    raise PosencError(f"{text!r} selects no layers of this model.{suggestion(text, known)}")


# --- named plans, from papers ---


def swan(every: int = 4, window: int = 512) -> dict[Selector, Any]:
    """SWAN (2504.08719): layers without positions see all keys, with temperature ln n; the others have RoPE and see a
    window."""
    return {f"every {every}th from 0": ("none", {"temperature": "log"}), REST: ("window", {"window": window})}


def rnope_swa(every: int = 4, window: int = 4096) -> dict[Selector, Any]:
    """RNoPE-SWA (2501.18795): every fourth layer sees all keys, without positions; the others have RoPE and see a
    window."""
    return {f"every {every}th": "none", REST: ("window", {"window": window})}


def irope(every: int = 4, floor: int = 8192, beta: float = 0.1) -> dict[Selector, Any]:
    """Like Llama 4: every fourth layer has no positions and Llama 4's temperature. The others keep RoPE and see all
    keys, without Llama 4's chunks."""
    return {f"every {every}th": ("none", {"temperature": {"kind": "llama4", "floor": floor, "beta": beta}})}


NAMED: dict[str, Callable[..., dict[Selector, Any]]] = {"swan": swan, "rnope_swa": rnope_swa, "irope": irope}


SchemeOrDraft = Scheme | Draft
"""What a user can request for a model."""


def scheme_or_plan(given: Any, options: Mapping[str, Any]) -> SchemeOrDraft:
    """A scheme or a plan, in any form in which users write them."""
    return plan_from(given, options) if is_plan(given) else scheme_from(given, options)


def is_plan(given: object) -> bool:
    """Whether a request is a plan: groups of layers, their text, or the name of a plan."""
    if isinstance(given, str):
        return given in NAMED or ":" in given
    return isinstance(given, (Draft, Mapping)) or (isinstance(given, Sequence) and not isinstance(given, str))


def plan_from(given: Any, options: Mapping[str, Any]) -> Draft:
    """A plan in any form in which users write it. `options` are those of a named plan, and lengths and temperature for
    all parts that do not have their own."""
    told = {key: value for key, value in options.items() if value is not None}
    shared = {key: told.pop(key) for key in SHARED if key in told}
    if isinstance(given, str) and given in NAMED:
        try:
            given = NAMED[given](**told)
        except TypeError:
            known = list(NAMED[given].__annotations__)[:-1]
            raise PosencError(
                f"The plan {given!r} has the options {', '.join(known)}, got {', '.join(told)}."
            ) from None
        told = {}
    elif isinstance(given, str):
        given = _split_groups(given)
    if told:
        raise PosencError(
            f"A plan has no options of its own, got {', '.join(told)}. Give options to the scheme of a group."
        )
    if isinstance(given, Draft):
        return given
    groups = list(given.items()) if isinstance(given, Mapping) else [tuple(group) for group in given]
    if not groups or any(len(group) != 2 for group in groups):
        raise PosencError(
            "scheme must be a name or a scheme object, or a plan: groups of layers with a scheme each, as in "
            f"{{'every 4th': 'none', 'rest': 'yarn'}}; got {given!r} of type {type(given).__name__}."
        )
    if [selector for selector, _ in groups].count(REST) > 1:
        raise PosencError("A plan can have only one group 'rest'. Leave the others out.")
    return Draft(tuple((selector, _group_scheme(asked, shared)) for selector, asked in groups))


def _group_scheme(asked: Any, shared: Mapping[str, Any]) -> Scheme | None:
    if asked is None or asked == OWN:
        return None
    if isinstance(asked, str):
        name, *pairs = _split_words(asked)
        asked = (name, dict(map(_parse_option, pairs)))
    if isinstance(asked, Mapping):
        asked = (asked.get("name"), {key: value for key, value in asked.items() if key != "name"})
    if isinstance(asked, Scheme):
        unsaid = {key: value for key, value in shared.items() if getattr(asked, key) is None}
        return scheme_from(replace(asked, **unsaid), {})
    if not isinstance(asked, Sequence) or len(asked) != 2 or not isinstance(asked[1], Mapping):
        raise PosencError(f"A group of a plan has a scheme: a name, (name, options), or 'own'; got {asked!r}.")
    name, options = asked
    lengths = {"target_length", "factor"}
    unsaid = {k: v for k, v in shared.items() if k not in options and not (k in lengths and lengths & set(options))}
    made = scheme_from(name, {**unsaid, **options})
    if not SCHEMES.origin(made.name).built_in:
        raise PosencError(f"Plans take schemes of this package, and {made.name!r} is not one of them.")
    return made


def _split_groups(text: str) -> dict[str, str]:
    """Split a text such as `every 4th: none; rest: window window=4096`. The colon of a slice has no space after it."""
    groups = {}
    for group in filter(None, (piece.strip() for piece in text.split(";"))):
        selector, colon, scheme = group.partition(": ")
        if not colon or selector.strip() in groups:
            raise PosencError(
                f"A plan is written 'every 4th: none; rest: window window=4096', each group once; got {text!r}."
            )
        groups[selector.strip()] = scheme.strip()
    return groups


def _split_words(text: str) -> list[str]:
    """Split a text into words; quotes keep words together, as in `none temperature='drope c=0.2'`."""
    return [word.replace("'", "") for word in re.findall(r"(?:[^\s']|'[^']*')+", text)]


def _parse_option(word: str) -> tuple[str, Any]:
    key, equals, value = word.partition("=")
    if not equals:
        raise PosencError(f"An option of a scheme in a plan is name=value, as in 'window window=4096'; got {word!r}.")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value
