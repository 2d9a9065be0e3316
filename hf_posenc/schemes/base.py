"""`Scheme`, the base class of all schemes: options, how they are checked and stored, and the registry of schemes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from ..core.axes import ONE_AXIS
from ..core.effects import Effect, Geometry, OwnTable, Span
from ..core.ranges import Range
from ..errors import PosencError, UnsupportedCell, suggestion
from ..registry import Plugins, Registry
from .option_checks import CheckedOptions
from .temperature import TemperatureKind, refuse_images, temperature_from
from .temperature_effect import add_temperature

S = TypeVar("S", bound="type[Scheme]")

SCHEMES: Registry[type[Scheme]] = Registry("scheme", Plugins("hf_posenc.schemes"))
NAME = re.compile("[a-z][a-z0-9_]*")


def span(geometry: Geometry, target_length: int | None, factor: float | None) -> Span:
    """The trained length, target length and factor from any two of them. Contradictions raise."""
    trained = geometry.trained_length
    if target_length is not None and target_length < trained:
        raise PosencError(
            f"target_length={target_length} is shorter than the trained length {trained}. Give a target of at least "
            f"{trained}, or trained_length= if the config overstates what the model was trained on."
        )
    if target_length is None and factor is None:
        return Span(trained, trained, None)
    if target_length is None:
        assert factor is not None
        return Span(trained, round(trained * factor), float(factor))
    if factor is not None and abs(trained * factor - target_length) >= 1:
        raise PosencError(
            f"target_length={target_length} and factor={factor} contradict each other: the model was trained at "
            f"{trained}, so that factor {factor} reaches {trained * factor:g} and a target of {target_length} needs "
            f"factor {target_length / trained:g}. Give one of the two, or trained_length= if the config is wrong."
        )
    return Span(trained, target_length, float(factor) if factor is not None else target_length / trained)


def register_scheme(cls: S) -> S:
    """Register a scheme under its name for `patch_model`, `load`, the command line and the tests.

    In another package, decorate the class with this and declare its module as an entry point of the group
    `hf_posenc.schemes` under the scheme's name. Without an entry point, import the module before using the scheme.
    """
    fault = _fault(cls)
    if fault is not None:
        raise PosencError(f"{getattr(cls, '__qualname__', cls)!r} cannot be registered as a scheme: {fault}.")
    SCHEMES.add(cls.name, cls, cls.__module__)
    return cls


def _fault(cls: Any) -> str | None:
    """Why a class cannot be a scheme; None if it can."""
    if not isinstance(cls, type) or not issubclass(cls, Scheme):
        return "it must be a class derived from hf_posenc.Scheme"
    params = vars(cls).get("__dataclass_params__")
    if params is None or not params.frozen or not all(field.kw_only for field in dataclasses.fields(cls)):
        return "decorate it with @dataclass(frozen=True, kw_only=True), below @register_scheme"
    for attribute in ("name", "summary"):
        if not isinstance(getattr(cls, attribute, None), str):
            return f"it needs {attribute} = '...', without a type"
    if not NAME.fullmatch(cls.name):
        return f"its name {cls.name!r} should be of small letters, digits and underscores"
    if cls.effect is Scheme.effect:
        return "it needs effect(geometry), which says what it does"
    return None


@dataclass(frozen=True, kw_only=True)
class Scheme(CheckedOptions):
    """A position mechanism with its options, which are checked on creation.

    `effect` says what it does to a model of a given geometry. The class attributes below declare what must be known
    before there is a model.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    extends: ClassVar[bool] = False
    """Whether it extends the context beyond the trained length, and so needs a target length or factor."""
    rescales: ClassVar[bool] = False
    """Whether it starts from the model's present frequencies, which may already be scaled."""
    follows: ClassVar[bool] = False
    """Whether its angles depend on the length or on the pair, so that q and k are rotated inside attention."""
    adds_to_input: ClassVar[bool] = False
    """Whether it adds vectors to the input of the first layer."""
    per_layer: ClassVar[bool] = False
    """Whether it has parameters for each layer, and so needs `Geometry.layers`."""
    axes: ClassVar[range] = ONE_AXIS
    """The numbers of coordinate axes that it supports: a text has one, an image two."""
    factor_reaches: ClassVar[bool] = True
    """Whether `factor` sets the target length."""
    keeps: ClassVar[tuple[str, ...]] = ()
    """The kinds of positions (as families name them) with which a model works under this scheme without training."""
    nearest: ClassVar[str | None] = None
    """For a scheme that other runtimes cannot run: the name of a similar one that they can."""
    example: ClassVar[Mapping[str, Any]] = {}
    """Options with which it has an effect on a text of about thirty tokens, for tests on tiny models."""

    target_length: int | None = None
    trained_length: int | None = None
    factor: float | None = None
    temperature: TemperatureKind | Mapping[str, Any] | str | None = None
    """Multiplies queries. None keeps a temperature that the model's own code applies."""

    def __post_init__(self) -> None:
        if self.temperature is not None:
            object.__setattr__(self, "temperature", temperature_from(self.temperature))
        for field in dataclasses.fields(self):
            if field.default is not None and getattr(self, field.name) is None:
                raise PosencError(f"{field.name} cannot be None; leave it out for its default, {field.default!r}.")
        self._check_count("target_length", "trained_length")
        self._check_number("factor", least=1.0)

    def effect(self, geometry: Geometry) -> Effect:
        """What the scheme does at each site of a model. Called only for models with a supported number of axes."""
        raise NotImplementedError

    def effect_on(self, geometry: Geometry) -> Effect:
        """`effect` with its temperature, after checks: the axes are supported, and the class declares what it does."""
        self.refuse_other_axes(geometry.axes)
        effect = self.effect(geometry)
        self.refuse_undeclared(effect)
        if not isinstance(self.temperature, TemperatureKind):
            return effect
        refuse_images(geometry.axes)
        return add_temperature(effect, self.temperature, geometry, self.span(geometry))

    def effects(self, geometries: Mapping[str, Geometry]) -> dict[str, Effect]:
        """The effect on each group of layers, each with its own modules."""
        made = {name: self.part(name).effect_on(geometry) for name, geometry in geometries.items()}
        return {name: dataclasses.replace(effect, apart=self.apart) for name, effect in made.items()}

    def part(self, group: str) -> Scheme:
        """The scheme of a group of layers. Only a plan has different ones."""
        return self

    @property
    def has_temperature(self) -> bool:
        """Whether a temperature was requested for any layer."""
        return self.temperature is not None

    @property
    def apart(self) -> bool:
        """Whether layers that share the model's angles are patched differently, as in most plans."""
        return False

    def refuse_other_axes(self, axes: int) -> None:
        """Raise if the scheme does not support coordinates with this number of axes."""
        if axes not in self.axes:
            able = sorted(name for name, cls in SCHEMES.items() if axes in cls.axes)
            raise UnsupportedCell(
                f"{self.name!r} counts the tokens of a text, and this model reads images, which have rows and "
                f"columns. Schemes for images: {', '.join(able)}."
            )

    def theta(self, geometry: Geometry) -> float | None:
        """The theta of the frequencies that it uses or keeps; None if nothing rotates."""
        return float(geometry.rope["rope_theta"]) if geometry.rope else None

    def span(self, geometry: Geometry) -> Span:
        """The trained and the target length. Raises if the scheme needs a target and none was given."""
        found = span(geometry, self.target_length, self.factor)
        if self.extends and found.factor is None:
            raise PosencError(
                f"{self.name!r} needs to know how far to reach: give target_length= (the model was trained at "
                f"{geometry.trained_length}) or factor=."
            )
        return found

    def ranges(self, geometry: Geometry) -> dict[str, Range]:
        """The options that a search may tune on this model, with their ranges; {} for none."""
        return {}

    def refuse_undeclared(self, effect: Effect) -> None:
        """Raise if the class does not declare what its effect does. Others read declarations before effects."""
        follows = effect.rotation is not None and effect.rotation.follows_length
        adds = effect.table is not None and not isinstance(effect.table, OwnTable)
        for declared, does in (("follows", follows), ("adds_to_input", adds)):
            if does and not getattr(self, declared):
                raise PosencError(
                    f"The scheme {self.name!r} does not declare what its effect does: add {declared} = True to the "
                    f"class {type(self).__name__}."
                )

    def options(self) -> dict[str, Any]:
        """The options that are not None, as values for JSON."""
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {k: _json_value(v) for k, v in given.items() if v is not None}

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Scheme:
        """The scheme with these options. The error about an unknown option suggests the closest one."""
        known = [f.name for f in dataclasses.fields(cls)]
        for key in options:
            if key not in known:
                raise PosencError(f"The scheme {cls.name!r} has no option {key!r}.{suggestion(key, known)}")
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
        return cls(**values)


def _json_value(value: Any) -> Any:
    """The value of an option for JSON."""
    if isinstance(value, TemperatureKind):
        return value.options()
    return list(value) if isinstance(value, tuple) else value


def scheme_from(scheme: str | Scheme, options: Mapping[str, Any]) -> Scheme:
    """A scheme from its name and options; a scheme object is returned unchanged."""
    if isinstance(scheme, str):
        return SCHEMES[scheme].from_options({k: v for k, v in options.items() if v is not None})
    if isinstance(scheme, Scheme):
        given = sorted(k for k, v in options.items() if v is not None)
        if given:
            raise PosencError(
                f"A scheme object carries its own options; {', '.join(given)} beside it would be ignored. "
                f"Give them to {type(scheme).__name__}(...) or name the scheme: scheme={scheme.name!r}."
            )
        if SCHEMES.registered().get(getattr(scheme, "name", "")) is not type(scheme):
            raise PosencError(
                f"{type(scheme).__name__} is not registered, so that no checkpoint of it could be read: decorate the "
                "class with @register_scheme (a class that was defined again must be made anew as well)."
            )
        return scheme
    raise PosencError(
        f"scheme must be a name or a scheme object, got {scheme!r} of type {type(scheme).__name__}. "
        f"Known: {', '.join(sorted(SCHEMES))}."
    )
