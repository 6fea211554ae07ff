"""Intervals of medians, of whatever distribution the values are."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

CONFIDENCE = 0.95
FEWEST = 6  # values: below it even the smallest and the largest enclose the median with less than CONFIDENCE


@dataclass(frozen=True)
class Median:
    """low, high: an interval that holds the true median with CONFIDENCE; None of too few values."""

    value: float
    low: float | None
    high: float | None

    @property
    def is_within(self) -> float | None:
        """Half the interval's width, as a share of the median."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2 / self.value

    def to_dict(self) -> dict[str, float | None]:
        return {"median": self.value, "low": self.low, "high": self.high}


def median(values: Sequence[float]) -> Median:
    """The interval lies between order statistics (Conover, "Practical Nonparametric Statistics", 1999, section 3.2).

    Each value is below the true median with a chance of one half, so the n-th smallest is above it only where fewer
    than n of all values are below: a sum of binomial terms.
    """
    ordered, count = sorted(values), len(values)
    outside, cut = 0.0, 0  # chance that the median lies outside, and values cut off on either side
    while True:
        outside += 2 * comb(count, cut) / 2**count
        if outside > 1 - CONFIDENCE:
            break
        cut += 1
    value = statistics.median(ordered)
    return Median(value, ordered[cut - 1], ordered[count - cut]) if cut else Median(value, None, None)
