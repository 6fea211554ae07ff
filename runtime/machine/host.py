"""The host's memory, as Linux and the container tell it, and sizes as text."""

from __future__ import annotations

import ctypes
import re
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class AvailableMemory:
    """Bytes. available: what can be had without swapping, the page cache given up, within the container's limit.

    limit: of this container, None where there is none below the total.
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
    group = root / "sys/fs/cgroup"
    text = read_text(group / "memory.max")
    limit = int(text) if text.isdigit() and int(text) < sizes["MemTotal"] else None
    available = sizes["MemAvailable"]
    if limit is not None:
        available = max(min(available, limit - _held_bytes(group)), 0)
    return AvailableMemory(available, sizes["MemTotal"], sizes.get("SwapTotal", 0), limit)


def _held_bytes(group: Path) -> int:
    """What the container's processes hold, the file cache left out."""
    current = read_text(group / "memory.current")
    cache = re.findall(r"^(?:in)?active_file (\d+)$", read_text(group / "memory.stat"), re.MULTILINE)
    return max(int(current) - sum(map(int, cache)), 0) if current.isdigit() else 0


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


def read_text(path: Path) -> str:
    """A small file's text without its end, empty when it can't be read."""
    try:
        return path.read_bytes().decode("utf-8", "replace").strip("\0\n ")
    except OSError:
        return ""
