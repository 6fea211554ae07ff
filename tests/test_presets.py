"""Released shapes, shrunk, from a random checkpoint to engines: those whose structure no pair of tests/pairs.py has."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.engines.build import build_engines
from slipstream.export.opening import open_pair
from slipstream.export.pair import ExportSettings, export_pair
from slipstream.export.presets import configs_of
from slipstream.export.reference import Reference
from slipstream.export.synth import synthesize
from slipstream.export.verify import sample_prompts, verify
from slipstream.runtime.bundle import Bundle, open_bundle
from slipstream.runtime.engine_record import EngineSettings
from slipstream.runtime.errors import BackendError

from .conftest import SilentProgress
from .pairs import BOS


def exported_and_verified(preset: str, folder: Path) -> Bundle:
    """With prompts on both sides of the window, plain and drafted beyond the bundle's K."""
    synthesize(configs_of(preset), folder / "pair", "tiny", SilentProgress(), dtype="float32")
    target, assistant = folder / "pair" / "target", folder / "pair" / "assistant"
    pair = open_pair(target, assistant)
    max_length = pair.target_config.sliding_window + 100
    settings = ExportSettings(max_length=max_length, num_draft_tokens=2)
    export_pair(pair, folder / "bundle", settings, SilentProgress())
    bundle = open_bundle(folder / "bundle")
    prompts = sample_prompts(range(300, 900), BOS, 2, max_length - 60, max_length, 8)
    assert min(map(len, prompts)) < bundle.manifest.sliding_window < max(map(len, prompts))
    report = verify(bundle, Reference(target, assistant, "float32"), prompts, 8, [0, 6], SilentProgress())
    assert report.failures == []
    return bundle


def engines_of(bundle: Bundle) -> EngineSettings:
    return EngineSettings(
        flavour="tensorrt-rtx",
        device="sm120",
        max_length=bundle.manifest.max_length,
        max_batch=1,
        num_draft_tokens=2,
        workspace_mib=1024,
    )


@pytest.mark.slow
def test_e2b_verifies_beyond_its_window_and_builds(tmp_path: Path) -> None:
    """Per-layer embeddings, shared KV and the centroid head, at head sizes of 256 and 512."""
    pytest.importorskip("tensorrt_rtx", reason="pip install 'slipstream[tensorrt-rtx]'")
    bundle = exported_and_verified("e2b", tmp_path)
    record = build_engines(bundle, engines_of(bundle), SilentProgress()).record
    assert {(shape.num_kv_heads, shape.head_dim) for shape in record.attention} == {(1, 256), (1, 512)}


@pytest.mark.slow
def test_26b_a4b_verifies_beyond_its_window_and_is_refused_by_the_build(tmp_path: Path) -> None:
    """Its experts' loop makes TensorRT-RTX 1.7.1 crash, which no user should have to see."""
    pytest.importorskip("tensorrt_rtx", reason="pip install 'slipstream[tensorrt-rtx]'")
    bundle = exported_and_verified("26b-a4b", tmp_path)
    with pytest.raises(BackendError, match=r"has mixture-of-experts layers.*--engine onnxruntime"):
        build_engines(bundle, engines_of(bundle), SilentProgress())
