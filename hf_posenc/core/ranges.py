"""The values that a search may try for an option."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """From `low` to `high`, evenly or, with `log`, so that equal steps are equal ratios."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def at(self, share: float) -> float:
        """The value at a share of the range, 0 to 1; a whole number where only those make sense."""
        share = min(max(share, 0.0), 1.0)
        if self.log:
            value = math.exp(math.log(self.low) + share * (math.log(self.high) - math.log(self.low)))
        else:
            value = self.low + share * (self.high - self.low)
        return round(value) if self.whole else value

    def share(self, value: float) -> float:
        """Where in the range a value stands; those outside stand at its ends."""
        value = min(max(value, self.low), self.high)
        if self.low == self.high:
            return 0.0
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)
