"""Who used the CPUs in a while: this process, or others and the hypervisor."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path


def core_seconds(stat: str, cpus: Collection[int]) -> tuple[float, float]:
    """Seconds that CPUs were busy or stolen by the hypervisor, and all their seconds; from the text of /proc/stat."""
    names, busy, total = {f"cpu{cpu}" for cpu in cpus}, 0, 0
    for name, *fields in (line.split() for line in stat.splitlines() if line):
        if name in names:
            ticks = [int(field) for field in fields[:8]]  # what follows, time of guests, is in the first two already
            _, _, _, idle, iowait, *_ = ticks
            total += sum(ticks)
            busy += sum(ticks) - idle - iowait
    per_second = os.sysconf("SC_CLK_TCK")
    return busy / per_second, total / per_second


def share_of_others(before: str, after: str, cpus: Collection[int], own_seconds: float) -> float | None:
    """Share of the CPUs' time between two texts of /proc/stat that this run did not use itself and did not have.

    own_seconds: CPU time of the run in between. None where the texts count nothing, as in some sandboxes.
    """
    (busy, total), (busy_then, total_then) = core_seconds(after, cpus), core_seconds(before, cpus)
    if total <= total_then:
        return None
    return max(0.0, busy - busy_then - own_seconds) / (total - total_then)


def cpu_times() -> tuple[str, float]:
    """/proc/stat, "" where there is none, and the CPU seconds of this process and of its children that have ended."""
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    stat = Path("/proc/stat")
    return stat.read_text(encoding="utf-8") if stat.exists() else "", own
