"""Memory and cores of this machine, as fixture trees of /proc and /sys tell them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slipstream.runtime.machine.host import num_usable_cores, read_state

MEMORY = {"proc/meminfo": "MemTotal: 8000000 kB\nMemAvailable: 6000000 kB\n"}
GIB = 1 << 30
TOP = "sys/fs/cgroup"
UNLIMITED_V1 = "9223372036854771712"
SERVICE = "system.slice/chat.service"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content + "\n")
    return root


def test_a_container_has_what_its_processes_left(tmp_path: Path) -> None:
    files = {
        f"{TOP}/memory.max": "1000000",
        f"{TOP}/memory.current": "900000",
        f"{TOP}/memory.stat": "anon 300000\nactive_file 200000\ninactive_file 300000",
    }
    state = read_state(write(tmp_path, MEMORY | files))
    assert state is not None
    assert state.available == 1_000_000 - (900_000 - 500_000)


V2 = {"proc/self/cgroup": f"0::/{SERVICE}"}
V1 = {"proc/self/cgroup": f"9:cpu,cpuacct:/{SERVICE}\n8:memory:/{SERVICE}\n1:name=systemd:/{SERVICE}"}
DOCKER = "docker/0123456789ab"
MOUNTED = "30 23 0:26 /docker/0123456789ab /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"


@pytest.mark.parametrize(
    "files",
    [
        pytest.param(V2 | {f"{TOP}/{SERVICE}/memory.max": str(2 * GIB)}, id="v2, own group"),
        pytest.param(
            V2 | {f"{TOP}/system.slice/memory.max": str(2 * GIB), f"{TOP}/{SERVICE}/memory.max": str(3 * GIB)},
            id="v2, a parent's is smaller",
        ),
        pytest.param(
            V2 | {f"{TOP}/{SERVICE}/memory.max": "max", f"{TOP}/system.slice/memory.max": str(2 * GIB)},
            id="v2, a parent's alone",
        ),
        pytest.param(
            V2 | {f"{TOP}/{SERVICE}/memory.max": str(4 * GIB), f"{TOP}/{SERVICE}/memory.high": str(2 * GIB)},
            id="v2, throttled before the limit",
        ),
        pytest.param(
            V1
            | {
                f"{TOP}/memory/{SERVICE}/memory.limit_in_bytes": UNLIMITED_V1,
                f"{TOP}/memory/system.slice/memory.limit_in_bytes": str(2 * GIB),
            },
            id="v1",
        ),
        pytest.param(
            {
                "proc/self/cgroup": f"8:memory:/{SERVICE}\n0::/{SERVICE}",
                f"{TOP}/unified/{SERVICE}/cgroup.procs": "1",
                f"{TOP}/memory/{SERVICE}/memory.limit_in_bytes": str(2 * GIB),
            },
            id="hybrid",
        ),
        pytest.param(
            {"proc/self/cgroup": f"0::/{DOCKER}", f"{TOP}/memory.max": str(2 * GIB)}, id="v2, a path of the host's"
        ),
        pytest.param(
            {"proc/self/cgroup": "0::/../../other", f"{TOP}/memory.max": str(2 * GIB), "other/memory.max": "1"},
            id="v2, a path above the container's",
        ),
        pytest.param(
            {
                "proc/self/cgroup": f"8:memory:/{DOCKER}/inner",
                "proc/self/mountinfo": MOUNTED,
                f"{TOP}/memory/inner/memory.limit_in_bytes": str(2 * GIB),
                f"{TOP}/memory/memory.limit_in_bytes": str(3 * GIB),
            },
            id="v1, a group in a container",
        ),
        pytest.param(
            {
                "proc/self/cgroup": f"0::/{SERVICE}",
                "proc/self/mountinfo": "30 23 0:26 / /cgroups rw shared:4 - cgroup2 cgroup2 rw",
                f"cgroups/{SERVICE}/memory.max": str(2 * GIB),
            },
            id="v2, mounted elsewhere",
        ),
    ],
)
def test_the_smallest_limit_up_to_the_root_counts(files: dict[str, str], tmp_path: Path) -> None:
    state = read_state(write(tmp_path, MEMORY | files))
    assert state is not None
    assert (state.limit, state.available) == (2 * GIB, 2 * GIB)


def test_every_groups_own_use_is_taken_off_its_own_limit(tmp_path: Path) -> None:
    files = {
        f"{TOP}/{SERVICE}/memory.max": str(2 * GIB),
        f"{TOP}/{SERVICE}/memory.current": str(GIB // 2),
        f"{TOP}/system.slice/memory.max": str(3 * GIB),
        f"{TOP}/system.slice/memory.current": str(2 * GIB),
    }
    state = read_state(write(tmp_path, MEMORY | V2 | files))
    assert state is not None
    assert (state.limit, state.available) == (2 * GIB, GIB)


def test_the_cache_of_a_v1_group_is_left_out_with_that_of_groups_below(tmp_path: Path) -> None:
    files = {
        f"{TOP}/memory/{SERVICE}/memory.limit_in_bytes": str(2 * GIB),
        f"{TOP}/memory/{SERVICE}/memory.usage_in_bytes": str(GIB),
        f"{TOP}/memory/{SERVICE}/memory.stat": f"inactive_file 1\ntotal_active_file 0\ntotal_inactive_file {GIB // 2}",
    }
    state = read_state(write(tmp_path, MEMORY | V1 | files))
    assert state is not None
    assert state.available == 2 * GIB - GIB // 2


def test_limits_above_what_the_machine_has_are_none(tmp_path: Path) -> None:
    state = read_state(write(tmp_path, MEMORY | V2 | {f"{TOP}/{SERVICE}/memory.max": str(64 * GIB)}))
    assert state is not None
    assert (state.limit, state.available) == (None, 6000000 << 10)


@pytest.mark.parametrize(
    ("files", "num_cores"),
    [
        pytest.param({}, 8, id="none"),
        pytest.param(V2 | {f"{TOP}/{SERVICE}/cpu.max": "max 100000"}, 8, id="v2, unlimited"),
        pytest.param(V2 | {f"{TOP}/{SERVICE}/cpu.max": "50000 100000"}, 1, id="v2, half a core"),
        pytest.param(V2 | {f"{TOP}/{SERVICE}/cpu.max": "250000 100000"}, 2, id="v2, two cores and a half"),
        pytest.param(V2 | {f"{TOP}/{SERVICE}/cpu.max": "1600000 100000"}, 8, id="v2, more than there are"),
        pytest.param(
            V2 | {f"{TOP}/{SERVICE}/cpu.max": "400000 100000", f"{TOP}/system.slice/cpu.max": "300000 100000"},
            3,
            id="v2, a parent's is smaller",
        ),
        pytest.param(
            V1
            | {
                f"{TOP}/cpu,cpuacct/{SERVICE}/cpu.cfs_quota_us": "-1",
                f"{TOP}/cpu,cpuacct/{SERVICE}/cpu.cfs_period_us": "100000",
                f"{TOP}/cpu,cpuacct/system.slice/cpu.cfs_quota_us": "50000",
                f"{TOP}/cpu,cpuacct/system.slice/cpu.cfs_period_us": "100000",
            },
            1,
            id="v1",
        ),
    ],
)
def test_cores_are_those_that_the_quota_pays_for(
    files: dict[str, str], num_cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))  # as cpusets narrow it, too
    assert num_usable_cores(write(tmp_path, files)) == num_cores
