"""Every model feature against transformers: logits of both graphs, hidden rows, greedy text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.export.verify.reference import Reference
from slipstream.export.verify.verify import sample_prompts, verify
from slipstream.runtime.bundle.manifest import open_bundle
from tests.support.pairs import BOS, PAIRS
from tests.support.progress import SilentProgress


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


def test_a_pair_that_drafts_at_the_last_position_equals_transformers(
    pair_folder: Callable[[str], tuple[Path, Path]], bundle_folder: Callable[..., Path]
) -> None:
    """N - 1 instead of N, with a draft longer than the graph that unrolls it."""
    bundle = open_bundle(bundle_folder("dense", draft_position="last"))
    prompts = sample_prompts(range(20, 280), BOS, 2, 16, 160, 12)
    report = verify(bundle, Reference(*pair_folder("dense"), "float32"), prompts, 12, [0, 4], SilentProgress())
    assert report.failures == []
    assert bundle.manifest.draft_position_offset == -1
    assert report.drafts.num_drafts >= 10
