"""What ``slipstream doctor`` finds on a Jetson: board, JetPack, power mode, heat."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from slipstream.runtime.machine.cgroups import read_text

from .findings import Finding, guarded

_QUERY_SECONDS = 2


def jetson_findings(root: Path) -> list[Finding]:
    """Nothing on other machines. root: where /proc, /etc, /sys and /var are."""
    release = read_text(root / "etc/nv_tegra_release")
    model = read_text(root / "proc/device-tree/model")
    # a container often sees neither of the two, but always the kernel
    kernel = read_text(root / "proc/sys/kernel/osrelease")
    if not (release or "Jetson" in model or "tegra" in kernel):
        return []
    return [
        guarded("jetson", _board, release, model, kernel),
        guarded("power mode", _power_mode, root),
        guarded("temperature", _temperature, root),
    ]


def _board(release: str, model: str, kernel: str) -> Finding:
    name = model or f"kernel {kernel}"
    found = re.search(r"R(\d+) \(release\), REVISION: (\d+)(?:\.(\d+))?", release)
    if not found:
        advice = "on the board: cat /etc/nv_tegra_release"
        return Finding("jetson", "missing", f"{name}, /etc/nv_tegra_release does not tell its release", advice)
    major, minor, patch = (int(number or 0) for number in found.groups())
    detail = f"{name}, Jetson Linux {major}.{minor}.{patch}; CPU and GPU share the memory"
    upgrade = "upgrade to JetPack 7.2.2 or later"
    if major <= 36:
        why = "JetPack 6 or older: its TensorRT 10.3 has no TensorScatter and Attention import, its Python is 3.10"
        return Finding("jetson", "problem", f"{detail}. {why}", upgrade)
    if (major, minor, patch) < (39, 2, 2):
        why = "JetPack before 7.2.2: TensorRT 11.0 to 11.3 leave it out"
        return Finding("jetson", "problem", f"{detail}. {why}", upgrade)
    return Finding("jetson", "ok", detail)


def _power_mode(root: Path) -> Finding:
    modes = re.findall(r"POWER_MODEL +ID=(\d+) +NAME=(\S+)", read_text(root / "etc/nvpmodel.conf"))
    names = {int(number): name for number, name in modes}
    # the fastest is not always 0: on Orin Nano MAXN_SUPER is 2
    best = next((number for number, name in names.items() if name.startswith("MAXN")), 0)
    advice = f"sudo nvpmodel -m {best}; sudo jetson_clocks"
    answer = _query()
    status = re.search(r"pmode:(\d+)", read_text(root / "var/lib/nvpmodel/status"))
    if asked := re.search(r"Power Mode: *(\S+)\s+(\d+)", answer):
        name, number = asked[1], int(asked[2])
    elif status:
        number = int(status[1])
        name = names.get(number, "")
    else:
        return Finding("power mode", "missing", "nvpmodel does not tell it here", "on the board: sudo nvpmodel -q")
    is_best = name.startswith("MAXN") or number == best
    text = f"{name or 'mode'} ({number})"
    return Finding("power mode", "ok", text) if is_best else Finding("power mode", "problem", f"{text}: slow", advice)


def _query() -> str:
    """nvpmodel's own words, "" where it is missing or does not answer."""
    command = shutil.which("nvpmodel")
    if command is None:
        return ""
    try:
        done = subprocess.run([command, "-q"], capture_output=True, text=True, check=False, timeout=_QUERY_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def _temperature(root: Path) -> Finding:
    """The hottest zone; a zone at its passive trip point slows the clocks down."""
    zones: list[tuple[int, str]] = []
    throttled: list[str] = []
    for folder in sorted((root / "sys/class/thermal").glob("thermal_zone*")):
        text = read_text(folder / "temp")  # zones of parts that are off have none
        if not text.lstrip("-").isdigit():
            continue
        name, heat = read_text(folder / "type") or folder.name, int(text)
        zones.append((heat, name))
        for trip in folder.glob("trip_point_*_type"):
            limit = read_text(trip.with_name(trip.name.removesuffix("type") + "temp"))
            if read_text(trip) == "passive" and limit.isdigit() and 0 < int(limit) <= heat:
                throttled.append(name)
    if not zones:
        return Finding("temperature", "missing", "no thermal zone can be read here", "on the board: tegrastats")
    heat, name = max(zones)
    detail = f"{heat / 1000:.0f} °C at most ({name})"
    if throttled:
        advice = "check the fan and the room around the board; tegrastats shows more"
        return Finding("temperature", "problem", f"{detail}; slowed down by {', '.join(throttled)}", advice)
    return Finding("temperature", "ok", detail)
