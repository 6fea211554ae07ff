"""How fast this machine reads memory while a benchmark runs, and whether the run was quiet enough to be believed.

A run is quiet where other programs and the hypervisor took at most OTHERS of the cores it may use, each figure was
measured REPEATS times or more, and the middle half of a figure's values lies within SPREAD of their median.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any

import numpy as np

from slipstream.runtime.machine.cpu_time import cpu_times, share_of_others

OTHERS, REPEATS, SPREAD = 0.05, 5, 0.10
_READ_BYTES = 2**29  # far beyond the caches
_PASSES = 3


def read_rates(num_threads: int) -> list[float]:
    """GB/s of some passes over memory, num_threads at once. A maximum reads as fast as C and BLAS do; sums do not."""
    parts = np.array_split(np.ones(_READ_BYTES // 8, np.int64), num_threads)  # written: untouched pages are no memory
    rates = []
    with ThreadPoolExecutor(num_threads) as threads:
        for _ in range(_PASSES):
            start = perf_counter()
            list(threads.map(np.max, parts))
            rates.append(_READ_BYTES / (perf_counter() - start) / 1e9)
    return rates


def spread(values: Sequence[float]) -> float:
    """Distance between the quartiles, over the median; 0 of a single value."""
    if len(values) < 2:
        return 0.0
    first, median, third = statistics.quantiles(values, n=4, method="inclusive")
    return (third - first) / median


def verdict(others: float | None, repeats: int, widest: float) -> str:
    """ "quiet", or "noisy: " and what was too much."""
    reasons = []
    if others is None:
        reasons.append("what others took of the cores is not known here")
    elif others > OTHERS:
        reasons.append(f"others took {others:.0%} of the cores, at most {OTHERS:.0%} is quiet")
    if repeats < REPEATS:
        reasons.append(f"repeats: {repeats}, at least {REPEATS} are wanted")
    if widest > SPREAD:
        reasons.append(f"values spread over {widest:.0%} of their median, at most {SPREAD:.0%} is quiet")
    return f"noisy: {'; '.join(reasons)}" if reasons else "quiet"


class Yardstick:
    """Watches one run, from when it is made until its report."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads, self._cpus = num_threads, os.sched_getaffinity(0)
        self._rates: list[float] = []
        self._stat, self._own = cpu_times()

    def read(self) -> None:
        """Read memory once more; call it between turns, in which nothing else runs."""
        self._rates += read_rates(self._num_threads)

    def report(self, values: Mapping[str, Sequence[float]]) -> dict[str, Any]:
        """What a result file says of its run. values: by figure, what each repeat gave; reading is added."""
        self.read()
        stat, own = cpu_times()
        others = share_of_others(self._stat, stat, self._cpus, own - self._own)
        repeats = min(map(len, values.values()))
        widest = max(values, key=lambda name: spread(values[name]))
        return {
            "run": verdict(others, repeats, spread(values[widest])),
            "bandwidth_gb_per_s": {
                "median": round(statistics.median(self._rates), 1),
                "best": round(max(self._rates), 1),
            },
            "share_of_others": None if others is None else round(others, 3),
            "repeats": repeats,
            "spread": {"widest": round(spread(values[widest]), 3), "of": widest},
        }
