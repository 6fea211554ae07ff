"""Medians and their intervals."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.runtime.bench.intervals import CONFIDENCE, FEWEST, median


@pytest.mark.parametrize(("count", "low", "high"), [(6, 1, 6), (8, 1, 8), (9, 2, 8), (20, 6, 15), (100, 40, 61)])
def test_intervals_are_the_order_statistics_of_the_tables(count: int, low: int, high: int) -> None:
    """Conover, table A3 (binomial, one half)."""
    found = median(list(range(count, 0, -1)))
    assert (found.value, found.low, found.high) == ((count + 1) / 2, low, high)


@pytest.mark.parametrize("count", [1, FEWEST - 1])
def test_few_values_have_no_interval(count: int) -> None:
    found = median([2.0] * count)
    assert (found.value, found.low, found.high, found.is_within) == (2.0, None, None, None)


def test_the_median_is_inside_as_often_as_promised() -> None:
    """Of a skewed distribution; an interval one value narrower would fail."""
    random, hits, trials = np.random.default_rng(0), 0, 4000
    for _ in range(trials):
        found = median(random.exponential(size=9).tolist())
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= np.log(2) <= found.high
    assert CONFIDENCE <= hits / trials < 0.975


def test_the_width_is_a_share_of_the_median() -> None:
    assert median([9, 10, 10, 10, 10, 11]).is_within == pytest.approx(0.1)
