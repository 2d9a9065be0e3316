"""Means with standard errors, and tests of differences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

CONFIDENCE = 0.95


def mean_and_error(values: Sequence[float], weights: Sequence[float] | None = None) -> tuple[float, float | None]:
    """The weighted mean and its standard error, of independent samples; a single one has no error."""
    n = len(values)
    weights = [1.0] * n if weights is None else weights
    total = math.fsum(weights)
    mean = math.fsum(w * x for w, x in zip(weights, values, strict=True)) / total
    if n < 2:
        return mean, None
    spread = math.fsum((w * (x - mean)) ** 2 for w, x in zip(weights, values, strict=True))
    return mean, math.sqrt(spread * n / (n - 1)) / total


def t_quantile(confidence: float, freedom: int) -> float:
    """How many standard errors a two-sided interval takes (Student's t, Abramowitz and Stegun 26.7.5)."""
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**k for k, term in enumerate(terms, 1))


def differ(first: Sequence[float], second: Sequence[float], pairs: int = 1) -> bool:
    """Whether paired samples differ significantly, with Bonferroni's correction for `pairs` comparisons."""
    mean, error = mean_and_error([a - b for a, b in zip(first, second, strict=True)])
    if error is None:
        return False
    return abs(mean) > error * t_quantile(1 - (1 - CONFIDENCE) / pairs, len(first) - 1)
