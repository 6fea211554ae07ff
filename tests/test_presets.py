"""The released pairs' shapes, shrunk: from a random checkpoint through export and verification to engines."""

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
from slipstream.runtime.bundle import open_bundle
from slipstream.runtime.engine_record import EngineSettings

from .conftest import SilentProgress
from .pairs import BOS

DEVICES = {"e2b": "sm89", "e4b": "sm120", "12b": "sm89", "26b-a4b": "sm120", "31b": "sm89"}


@pytest.mark.slow
@pytest.mark.parametrize("preset", list(DEVICES))
def test_a_released_shape_exports_verifies_beyond_its_window_and_builds(preset: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="pip install 'slipstream[tensorrt-rtx]'")
    synthesize(configs_of(preset), tmp_path / "pair", "tiny", SilentProgress(), dtype="float32")
    target, assistant = tmp_path / "pair" / "target", tmp_path / "pair" / "assistant"
    pair = open_pair(target, assistant)
    max_length = pair.target_config.sliding_window + 150
    settings = ExportSettings(max_length=max_length, num_draft_tokens=2)
    export_pair(pair, tmp_path / "bundle", settings, SilentProgress())
    bundle = open_bundle(tmp_path / "bundle")
    prompts = sample_prompts(range(300, 900), BOS, 2, max_length - 60, max_length, 12)
    assert min(map(len, prompts)) < bundle.manifest.sliding_window < max(map(len, prompts))
    report = verify(bundle, Reference(target, assistant, "float32"), prompts, 12, [0, 2, 6], SilentProgress())
    assert report.failures == []
    device = DEVICES[preset]
    engines = EngineSettings(
        flavour="tensorrt-rtx",
        device=device,
        max_length=max_length,
        max_batch=1,
        num_draft_tokens=2,
        workspace_mib=256,
    )
    record = build_engines(bundle, engines, SilentProgress()).record
    assert (record.settings.device, record.dtype) == (device, "float32")
