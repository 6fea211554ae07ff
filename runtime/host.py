"""The host's memory, as Linux and the container tell it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class HostMemoryState:
    """Bytes. available: what can be had without swapping, the page cache given up, within the container's limit.

    limit: of this container, None where there is none below the total.
    """

    available: int
    total: int
    swap: int
    limit: int | None


def read_state(root: Path = Path("/")) -> HostMemoryState | None:
    """None where /proc/meminfo does not tell. root: of the file system."""
    lines = re.findall(r"^(\w+): +(\d+) kB", read_text(root / "proc/meminfo"), re.MULTILINE)
    sizes = {name: int(size) << 10 for name, size in lines}
    if "MemAvailable" not in sizes or "MemTotal" not in sizes:
        return None
    text = read_text(root / "sys/fs/cgroup/memory.max")
    limit = int(text) if text.isdigit() and int(text) < sizes["MemTotal"] else None
    available = sizes["MemAvailable"] if limit is None else min(sizes["MemAvailable"], limit)
    return HostMemoryState(available, sizes["MemTotal"], sizes.get("SwapTotal", 0), limit)


def read_text(path: Path) -> str:
    """A small file's text without its end, empty when it can't be read."""
    try:
        return path.read_bytes().decode("utf-8", "replace").strip("\0\n ")
    except OSError:
        return ""
