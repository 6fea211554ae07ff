"""Every model feature against transformers: logits of both graphs, hidden rows, greedy text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.export.reference import Reference
from slipstream.export.verify import sample_prompts, verify
from slipstream.runtime.bundle import open_bundle

from .conftest import SilentProgress
from .pairs import BOS, PAIRS


@pytest.mark.parametrize("name", sorted(PAIRS))
def test_random_pair_equals_transformers(
    name: str, pair_folder: Callable[[str], tuple[Path, Path]], bundle_folder: Callable[[str], Path]
) -> None:
    bundle = open_bundle(bundle_folder(name))
    manifest = bundle.manifest
    prompts = sample_prompts(range(20, 380), BOS, 5, manifest.sliding_window, manifest.max_length, 24)
    report = verify(bundle, Reference(*pair_folder(name), manifest.dtype), prompts, 24, [0, 3, 5], SilentProgress())
    assert report.failures == []
    contexts = {check.context_length for check in report.logits}
    assert min(contexts) < manifest.sliding_window < max(contexts)
    assert len(report.greedy) == 3
