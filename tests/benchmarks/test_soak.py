"""The soak in small."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from . import soak


def test_many_streams_over_few_slots(bundle_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "FAIL_EVERY", 40)
    monkeypatch.setattr(soak, "_GROWTH_MIB", 200)  # of the first seconds
    found = soak.soak(bundle_folder("demo"), num_slots=4, num_streams=24, seconds=6)
    assert soak.failures(found) == []
    assert found["failures_injected"] > 0
    assert found["outcomes"]["cancelled"] > 0
    assert found["outcomes"]["length"] + found["outcomes"].get("stop_token", 0) > 20
