"""`Range`: the values that a search may try for an option of a scheme."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """From `low` to `high`, on a linear scale or, with `log`, on a logarithmic one; `whole` for whole numbers."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def at(self, share: float) -> float:
        """The value at a share of the range, from 0 (`low`) to 1 (`high`)."""
        share = min(max(share, 0.0), 1.0)
        if self.log:
            value = math.exp(math.log(self.low) + share * (math.log(self.high) - math.log(self.low)))
        else:
            value = self.low + share * (self.high - self.low)
        return round(value) if self.whole else value

    def share(self, value: float) -> float:
        """The share of the range at which a value is, the inverse of `at`; values outside count as the nearest end."""
        value = min(max(value, self.low), self.high)
        if self.low == self.high:
            return 0.0
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)
