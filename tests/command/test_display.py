"""What tables show that rich's markup could swallow, and when nothing is shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from slipstream.display import StageProgress, binding_table, memory_line, memory_table, peaks_table
from slipstream.runtime.bundle.manifest import open_bundle
from slipstream.runtime.errors import RequestError
from slipstream.runtime.machine.host import bytes_text
from slipstream.runtime.machine.plan import MemoryPlan, memory_plan


def test_the_binding_table_names_its_axes_and_every_buffer(bundle_folder: Callable[[str], Path]) -> None:
    console = Console(width=160, record=True, file=None)
    with console.capture() as captured:
        console.print(binding_table(open_bundle(bundle_folder("edge")).manifest))
    shown = captured.get()
    assert "KV buffers [batch, heads, capacity, head size]" in shown
    assert all(f"kv.{layer}.key" in shown for layer in (0, 1, 2))


def test_sizes_are_in_binary_units() -> None:
    assert [bytes_text(n) for n in (0, 1023, 1024, 5 << 20, 3 << 30)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "5.0 MiB",
        "3.0 GiB",
    ]


def test_a_plan_on_the_gpu_says_so_and_has_no_parts_of_the_hosts(bundle_folder: Callable[[str], Path]) -> None:
    manifest = open_bundle(bundle_folder("edge")).manifest
    host, gpu = memory_plan(manifest, 100, 1), memory_plan(manifest, 100, 1, place="gpu")
    assert "read while loading only" in text_of(host)
    assert "GPU memory" in text_of(gpu)
    assert "read while loading only" not in text_of(gpu)
    assert memory_line(gpu).endswith(" on the GPU")
    assert memory_line(host).endswith((" available", "not known here"))


def text_of(plan: MemoryPlan) -> str:
    console = Console(width=160, file=None)
    with console.capture() as captured:
        console.print(memory_table(plan))
    return captured.get()


def test_peaks_are_those_of_each_build(bundle_folder: Callable[[str], Path]) -> None:
    table = peaks_table(open_bundle(bundle_folder("edge")))
    assert table.row_count == 2  # and a row for each engine that is there


def test_a_refusal_before_the_first_stage_shows_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RequestError), StageProgress():
        raise RequestError("no")
    assert capfd.readouterr() == ("", "")
