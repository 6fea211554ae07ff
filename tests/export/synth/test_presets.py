"""Released shapes, shrunk, from a random checkpoint to engines: those whose structure no pair of pairs.py has.

All five, and true widths: ``python -m tests.benchmarks.presets``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.export.synth.presets import configs_of
from slipstream.runtime.bundle.manifest import open_bundle
from tests.benchmarks import presets
from tests.benchmarks.presets import build, true_width_configs, verified


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "kv_heads"),
    [
        # per-layer embeddings, shared KV and the centroid head, at head sizes of 256 and 512
        ("e2b", [(1, 256)] * 4 + [(1, 512)]),
        # mixtures of experts beside a shared MLP, K=V on full layers
        ("26b-a4b", [(8, 256)] * 5 + [(2, 512)]),
    ],
)
def test_a_preset_verifies_beyond_a_window_and_builds(
    preset: str, kv_heads: list[tuple[int, int]], tmp_path: Path
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="pip install 'slipstream[tensorrt-rtx]'")
    found = verified(preset, tmp_path, [0, 3], num_draft_tokens=1, window=128)
    manifest = found.bundle.manifest
    assert [(buffer.num_kv_heads, buffer.head_dim) for buffer in manifest.kv] == kv_heads
    assert found.report.failures == []
    assert min(found.prompt_lengths) < manifest.sliding_window < max(found.prompt_lengths)
    record = build(found.bundle, "sm120", manifest.max_length)
    assert {(shape.num_kv_heads, shape.head_dim) for shape in record.attention} == set(kv_heads)


def test_a_build_that_ends_badly_says_how(bundle_folder: Callable[[str], Path]) -> None:
    pytest.importorskip("tensorrt_rtx", reason="pip install 'slipstream[tensorrt-rtx]'")
    with pytest.raises(RuntimeError, match=r"(?s)build for sm90 ended with [1-9].*sm90 is not a target"):
        build(open_bundle(bundle_folder("edge")), "sm90", 100)


def test_what_failed_is_written_beside_other_results_and_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def crash(preset: str, folder: Path) -> dict[str, Any]:
        raise RuntimeError(f"build for {preset} ended with -11")

    out = tmp_path / "results.json"
    out.write_text('{"another": {"passed": true}}')
    monkeypatch.setattr(presets, "tiny_case", crash)
    monkeypatch.setattr(sys, "argv", ["presets", "--only", "e4b", "--out", str(out)])
    assert presets.main() == 1
    results = json.loads(out.read_text())
    assert list(results) == ["another", "e4b, tiny, float32"]
    assert not results["e4b, tiny, float32"]["passed"]
    assert results["e4b, tiny, float32"]["failures"] == ["RuntimeError: build for e4b ended with -11"]
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("preset", "widths", "num_layers", "num_shared"),
    [("e2b", [6144] * 5 + [12_288] * 5, 10, 5), ("e4b", [10_240] * 12, 12, 6)],
)
def test_a_true_width_period_keeps_every_width_of_its_preset(
    preset: str, widths: list[int], num_layers: int, num_shared: int
) -> None:
    target, _ = true_width_configs(preset, 262_144).resolved()
    full, _ = configs_of(preset).resolved()
    assert [layer.intermediate_size for layer in target.layers] == widths
    assert len(target.layers) == num_layers
    assert sum(not layer.owns_kv for layer in target.layers) == num_shared
    assert (target.hidden_size, target.ple_dim, target.vocab_size) == (full.hidden_size, 256, 262_144)
    assert {(layer.type, layer.head_dim, layer.num_kv_heads) for layer in target.layers} == {
        (layer.type, layer.head_dim, layer.num_kv_heads) for layer in full.layers
    }
