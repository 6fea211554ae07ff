"""The rule for quiet runs, on texts of /proc/stat."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from slipstream.runtime.machine.cpu_time import core_seconds, share_of_others

from .yardstick import Yardstick, read_rates, spread, verdict

PER_SECOND = os.sysconf("SC_CLK_TCK")


def stat(*cpus: tuple[int, ...]) -> str:
    """/proc/stat of CPUs with user, nice, system, idle, iowait, irq, softirq, steal, guest, guest_nice; in seconds."""
    rows = [f"cpu{number} {' '.join(str(value * PER_SECOND) for value in row)}" for number, row in enumerate(cpus)]
    sums = " ".join(str(sum(column) * PER_SECOND) for column in zip(*cpus, strict=True))
    return "\n".join([f"cpu  {sums}", *rows, "intr 12 0 3", "btime 1700000000"]) + "\n"


IDLE = (0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
BEFORE = stat(IDLE, IDLE)


def test_idle_and_waiting_cores_are_not_busy() -> None:
    assert core_seconds(stat((0, 0, 0, 7, 3, 0, 0, 0, 0, 0)), {0}) == (0, 10)


def test_the_summed_line_is_not_counted_beside_its_cpus() -> None:
    assert core_seconds(stat((4, 0, 0, 6, 0, 0, 0, 0, 0, 0), (2, 0, 0, 8, 0, 0, 0, 0, 0, 0)), {0, 1}) == (6, 20)


def test_guests_are_counted_once() -> None:
    assert core_seconds(stat((4, 0, 0, 6, 0, 0, 0, 0, 4, 0)), {0}) == (4, 10)


def test_a_run_alone_leaves_nothing_to_others() -> None:
    after = stat((10, 0, 0, 0, 0, 0, 0, 0, 0, 0), (0, 0, 0, 10, 0, 0, 0, 0, 0, 0))
    assert share_of_others(BEFORE, after, {0, 1}, own_seconds=10) == 0


def test_what_other_processes_used_is_theirs() -> None:
    after = stat((10, 0, 0, 0, 0, 0, 0, 0, 0, 0), (3, 1, 1, 5, 0, 0, 0, 0, 0, 0))
    assert share_of_others(BEFORE, after, {0, 1}, own_seconds=10) == pytest.approx(0.25)


def test_what_the_hypervisor_took_is_others() -> None:
    after = stat((8, 0, 0, 0, 0, 0, 0, 2, 0, 0))
    assert share_of_others(stat(IDLE), after, {0}, own_seconds=8) == pytest.approx(0.2)


def test_cores_that_the_run_may_not_use_are_left_out() -> None:
    after = stat((5, 0, 0, 5, 0, 0, 0, 0, 0, 0), (10, 0, 0, 0, 0, 0, 0, 0, 0, 0))
    assert share_of_others(BEFORE, after, {0}, own_seconds=5) == 0


def test_clocks_that_differ_a_little_give_no_negative_share() -> None:
    assert share_of_others(stat(IDLE), stat((9, 0, 0, 1, 0, 0, 0, 0, 0, 0)), {0}, own_seconds=9.01) == 0


def test_a_file_that_counts_nothing_gives_no_share() -> None:
    assert share_of_others(BEFORE, BEFORE, {0, 1}, own_seconds=1) is None


def test_spread_is_the_middle_half_over_the_median() -> None:
    assert spread([9, 10, 10, 11, 50]) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("others", "repeats", "widest", "reason"),
    [
        (0.05, 5, 0.10, "quiet"),
        (0.12, 5, 0.0, "noisy: others took 12% of the cores"),
        (None, 5, 0.0, "noisy: what others took of the cores is not known"),
        (0.0, 4, 0.0, "noisy: repeats: 4, at least 5"),
        (0.0, 5, 0.11, "noisy: values spread over 11%"),
    ],
)
def test_a_run_is_noisy_for_each_reason_alone(others: float | None, repeats: int, widest: float, reason: str) -> None:
    assert verdict(others, repeats, widest).startswith(reason)


def test_a_report_takes_the_fewest_repeats_and_the_widest_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.benchmarks.yardstick.read_rates", lambda num_threads: [20.0, 30.0, 25.0])
    report = Yardstick(1).report({"step": [1, 1, 1, 1, 1, 1], "round": [1, 2, 3, 4, 5]})
    assert (report["repeats"], report["spread"]) == (5, {"widest": pytest.approx(2 / 3, abs=1e-3), "of": "round"})
    assert report["bandwidth_gb_per_s"] == {"median": 25.0, "best": 30.0}
    assert report["run"].startswith("noisy")


def test_the_probe_reads_all_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    num_read: list[int] = []
    monkeypatch.setattr("tests.benchmarks.yardstick._READ_BYTES", 2**20)
    monkeypatch.setattr(np, "max", lambda part: num_read.append(part.nbytes))
    passes = len(read_rates(num_threads=3))
    assert (len(num_read), sum(num_read)) == (3 * passes, 2**20 * passes)


def test_every_benchmark_that_times_is_watched() -> None:
    texts = {path.name: path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("*.py")}
    timing = {name for name, text in texts.items() if name[:6] in ("bench_", "preset") and "_counter()" in text}
    timing |= {name for name, text in texts.items() if name.startswith("bench_") and "alternating(" in text}
    assert len(timing) >= 5
    assert not [name for name in timing if "watch.report(" not in texts[name]]
