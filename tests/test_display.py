"""What tables show that rich's markup could swallow, and when nothing is shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from slipstream.display import StageProgress, binding_table, bytes_text
from slipstream.runtime.bundle import open_bundle
from slipstream.runtime.errors import RequestError


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


def test_a_refusal_before_the_first_stage_shows_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RequestError), StageProgress():
        raise RequestError("no")
    assert capfd.readouterr() == ("", "")
