"""The size of a search."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..errors import PosencError


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Sizes of an evolutionary search. LongRoPE uses a population of 64, 32 parents and 40 rounds."""

    population: int = 16
    """New candidates in each round."""
    parents: int = 6
    """The best candidates so far, from which the next round is made."""
    rounds: int = 8
    samples: int = 16
    """Windows or needles that guide the search. Candidates that are bad on a few are not measured on all."""
    held_out: int = 24
    """Windows or needles that judge the result, from text that the search never saw."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise PosencError(f"{field.name} must be a whole number from 1 up, got {value!r}.")
        if self.parents > self.population:
            raise PosencError(
                f"{self.parents} parents cannot come out of a population of {self.population}: take fewer of them."
            )
        if self.held_out < 2:
            raise PosencError("One sample has no error bar: hold out at least 2 (held_out=).")

    @property
    def rungs(self) -> tuple[int, ...]:
        """The numbers of samples after which the worse half of the candidates is dropped."""
        return tuple(sorted({max(1, self.samples // 4), max(1, self.samples // 2), self.samples}))
