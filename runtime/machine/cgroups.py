"""Limits that control groups set for this process: memory and processors, of cgroup v1 and v2.

A limit of any group from the process's own up to the root binds it, so the smallest counts. A container sees its own
group as the root of the hierarchy, under whatever path the host has it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_MEMORY_LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")  # beyond memory.high work stands still
_MEMORY_HELD = ("memory.current", "memory.usage_in_bytes")


@dataclass(frozen=True)
class MemoryLimit:
    """Bytes. limit: of a group. held: by its processes, the file cache left out."""

    limit: int
    held: int


def memory_limits(root: Path) -> list[MemoryLimit]:
    """Every limit on this process's memory. root: of the file system."""
    found = []
    for folder in _group_folders(root, "memory"):
        limits = [int(text) for name in _MEMORY_LIMITS if (text := read_text(folder / name)).isdigit()]
        if limits:
            found.append(MemoryLimit(min(limits), _held_bytes(folder)))
    return found


def cpu_quota(root: Path) -> float | None:
    """Processors' worth of time that this process's groups may use, None without a limit. root: of the file system."""
    texts = []
    for folder in _group_folders(root, "cpu"):
        v1 = (read_text(folder / "cpu.cfs_quota_us"), read_text(folder / "cpu.cfs_period_us"))
        texts += [read_text(folder / "cpu.max"), " ".join(v1)]
    found = [re.fullmatch(r"(\d+) ([1-9]\d*)", text) for text in texts]  # "max", or -1 in v1, is no limit
    return min((int(numbers[1]) / int(numbers[2]) for numbers in found if numbers), default=None)


def read_text(path: Path) -> str:
    """A small file's text without its end, empty when it can't be read."""
    try:
        return path.read_bytes().decode("utf-8", "replace").strip("\0\n ")
    except OSError:
        return ""


def _group_folders(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the groups that this process is in, from its own to the root; not all of them need be there."""
    for line in (read_text(root / "proc/self/cgroup") or "0::/").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        for top, top_path in _mounts(root, controller, controllers):
            group = PurePosixPath(path)
            is_inside = group.is_relative_to(top_path) and ".." not in group.parts
            folder = top / group.relative_to(top_path) if is_inside else top
            yield folder
            while folder != top:
                folder = folder.parent
                yield folder


def _mounts(root: Path, controller: str, controllers: str) -> list[tuple[Path, str]]:
    """Where a hierarchy is mounted, and the path of the group that is its top there.

    controllers: of the hierarchy as /proc/self/cgroup names them, "" for that of v2.
    """
    found = []
    for line in read_text(root / "proc/self/mountinfo").splitlines():
        fields, _, system = line.partition(" - ")
        kind, *_, options = system.split() or [""]
        is_meant = kind == "cgroup" and controller in options.split(",") if controllers else kind == "cgroup2"
        if is_meant:
            top_path, mount = fields.split()[3:5]
            found.append((root / mount.lstrip("/"), top_path))
    usual = root / "sys/fs/cgroup"
    places = [usual / controllers, usual / controller] if controllers else [usual, usual / "unified"]
    return found or [(place, "/") for place in places]


def _held_bytes(folder: Path) -> int:
    held = next((int(text) for name in _MEMORY_HELD if (text := read_text(folder / name)).isdigit()), 0)
    stat = dict(re.findall(r"^(\w+) (\d+)$", read_text(folder / "memory.stat"), re.MULTILINE))
    prefix = "total_" if "total_inactive_file" in stat else ""  # v1 counts groups below apart
    cache = sum(int(stat.get(f"{prefix}{name}", 0)) for name in ("active_file", "inactive_file"))
    return max(held - cache, 0)
