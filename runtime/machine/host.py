"""The host's memory and cores, as Linux and its control groups tell them, and sizes as text."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from slipstream.runtime.bundle.manifest import Manifest

from .cgroups import cpu_quota, memory_limits, read_text

_SMALL_MODEL_BYTES = 64 * 2**20  # below, handing work to a second thread costs more than it gives


@dataclass(frozen=True)
class AvailableMemory:
    """Bytes. available: what can be had without swapping, the page cache given up, within every group's limit.

    limit: the smallest of this process's control groups, None where there is none below the total.
    """

    available: int
    total: int
    swap: int
    limit: int | None


def read_state(root: Path = Path("/")) -> AvailableMemory | None:
    """Memory of this machine, or of its container; None where /proc/meminfo does not tell. root: of the file system."""
    lines = re.findall(r"^(\w+): +(\d+) kB", read_text(root / "proc/meminfo"), re.MULTILINE)
    sizes = {name: int(size) << 10 for name, size in lines}
    if "MemAvailable" not in sizes or "MemTotal" not in sizes:
        return None
    limits = [limit for limit in memory_limits(root) if limit.limit < sizes["MemTotal"]]
    available = max(min([sizes["MemAvailable"], *(limit.limit - limit.held for limit in limits)]), 0)
    limit = min((limit.limit for limit in limits), default=None)
    return AvailableMemory(available, sizes["MemTotal"], sizes.get("SwapTotal", 0), limit)


def num_usable_cores(root: Path = Path("/")) -> int:
    """Cores that this process may keep busy: those it may run on, and no more than its CPU quota pays for in full."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(root)
    return allowed if quota is None else max(min(allowed, int(quota)), 1)


def usual_num_threads(manifest: Manifest) -> int:
    """Threads per operator unless asked for others: one for small models, every usable core otherwise."""
    table = manifest.per_layer_table  # a call reads a row of it per token
    multiplied = [record.size_bytes for name, record in manifest.files.items() if not table or name != table.file]
    return 1 if sum(multiplied) < _SMALL_MODEL_BYTES else num_usable_cores()


def give_back_freed_memory() -> None:
    """Let glibc return the pages of freed blocks to the system, which it keeps otherwise; nothing elsewhere."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)


def bytes_text(num_bytes: int) -> str:
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
