"""Checks of options for schemes and temperatures: frozen dataclasses that call these in `__post_init__`."""

from __future__ import annotations

import math

from ..errors import PosencError, suggestion

LARGEST = 10**12
"""The largest allowed number. Powers of smaller ones, as schemes compute them, do not overflow a float."""


def is_finite_number(value: object) -> bool:
    """Whether a value is a finite int or float (bool is not)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int that is too large for a float
        return False


def short_repr(value: object) -> str:
    """The repr of a value, shortened for an error message."""
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**30 else "a very large whole number"
    return text if len(text) <= 200 else text[:200] + "..."


class CheckedOptions:
    """Checks that a class with options can call. The value None passes."""

    def _check_count(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and not (
                isinstance(value, int) and not isinstance(value, bool) and 0 < value < LARGEST
            ):
                raise PosencError(
                    f"{name} must be a positive whole number below {LARGEST:g}, got {short_repr(value)}."
                )

    def _check_number(
        self, *names: str, least: float | None = None, above: float | None = None, most: float | None = None
    ) -> None:
        for name in names:
            value = getattr(self, name)
            if value is None:
                continue
            if not is_finite_number(value):
                raise PosencError(f"{name} must be a finite number, got {short_repr(value)}.")
            if abs(value) > LARGEST or 0 < abs(value) < 1 / LARGEST:
                raise PosencError(
                    f"{name} must be a number between {1 / LARGEST:g} and {LARGEST:g}, got {short_repr(value)}."
                )
            if least is not None and value < least:
                raise PosencError(f"{name} must be at least {least:g}, got {value!r}.")
            if above is not None and value <= above:
                raise PosencError(f"{name} must be greater than {above:g}, got {value!r}.")
            if most is not None and value > most:
                raise PosencError(f"{name} must be at most {most:g}, got {value!r}.")

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in choices:
            raise PosencError(f"{name}={value!r} is not a choice.{suggestion(value, list(choices))}")

    def _check_seed(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
            raise PosencError(f"{name} must be a whole number from 0 up, got {short_repr(value)}.")

    def _check_flag(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise PosencError(f"{name} must be True or False, got {value!r}.")
