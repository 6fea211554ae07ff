"""``slipstream build`` with TensorRT-RTX, which needs no GPU: engines, record, refusals, nothing half-written."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream import cli
from slipstream.engines import build as build_module
from slipstream.engines.build import build_engines
from slipstream.export.opening import open_pair
from slipstream.export.pair import ExportSettings, export_pair
from slipstream.runtime.bundle import Bundle, file_sha256, open_bundle
from slipstream.runtime.engine_record import EngineRecord, EngineSettings
from slipstream.runtime.errors import BackendError, MissingExtraError, RequestError, SlipstreamError

from .conftest import SilentProgress

pytest.importorskip("tensorrt_rtx", reason="pip install 'slipstream[tensorrt-rtx]'")


def settings(**changes: Any) -> EngineSettings:
    values: dict[str, Any] = {
        "flavour": "tensorrt-rtx",
        "device": "sm89",
        "max_length": 100,
        "max_batch": 2,
        "num_draft_tokens": 3,
        "workspace_mib": 256,
    }
    return EngineSettings(**(values | changes))


@pytest.fixture
def bundle(bundle_folder: Callable[[str], Path], tmp_path: Path) -> Bundle:
    return open_bundle(shutil.copytree(bundle_folder("edge"), tmp_path / "bundle"))


def test_two_engines_and_a_record_that_is_not_built_twice(bundle: Bundle) -> None:
    outcome = build_engines(bundle, settings(), SilentProgress())
    assert outcome.is_new
    assert sorted(p.name for p in outcome.folder.iterdir()) == ["assistant.engine", "record.json", "target.engine"]
    assert outcome.folder == bundle.folder / "engines" / "tensorrt-rtx-sm89"
    record = EngineRecord.model_validate_json((outcome.folder / "record.json").read_text(), strict=False)
    assert record == outcome.record
    assert record.bundle_sha256 == file_sha256(bundle.folder / "manifest.json")
    assert set(record.target.profiles) == {"prefill", "verify"}
    assert record.target.profiles["verify"]["num_draft_tokens"] == (0, 3, 3)
    assert record.target.profiles["verify"]["batch"] == (1, 1, 2)
    assert {(s.num_heads, s.num_kv_heads, s.head_dim, s.is_fused) for s in record.attention} == {
        (4, 1, 16, False),  # float32 has no fused kernels
        (4, 1, 32, False),
    }
    again = build_engines(bundle, settings(), SilentProgress())
    assert (again.is_new, again.record) == (False, record)
    (outcome.folder / "target.engine").write_bytes(b"damaged")
    assert build_engines(bundle, settings(), SilentProgress()).is_new
    open_bundle(bundle.folder)  # engines beside the graphs do not disturb the bundle


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("device", ["sm86", "sm120"])
def test_half_precision_pairs_build_for_other_devices(
    dtype: str, device: str, pair_folder: Callable[[str], tuple[Path, Path]], half_bundles: dict[str, Path]
) -> None:
    bundle = open_bundle(half_bundles[dtype])
    record = build_engines(bundle, settings(device=device, num_draft_tokens=1), SilentProgress()).record
    assert (record.dtype, record.settings.device) == (dtype, device)


@pytest.fixture(scope="module")
def half_bundles(
    pair_folder: Callable[[str], tuple[Path, Path]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    folders = {}
    for dtype in ("float16", "bfloat16"):
        folders[dtype] = tmp_path_factory.mktemp(dtype) / "bundle"
        export_pair(
            open_pair(*pair_folder("edge")),
            folders[dtype],
            ExportSettings(dtype=dtype, num_draft_tokens=1),
            SilentProgress(),
        )
    return folders


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"device": ""}, RequestError, "tensorrt-rtx needs --device, one of sm75, sm80, sm86, sm89, sm120"),
        ({"device": "sm90"}, RequestError, "sm90 is not a target of TensorRT-RTX .*; use --engine tensorrt"),
        ({"num_draft_tokens": 2}, RequestError, "assistant graphs of 1 and 3 steps; export with -k 2"),
        ({"max_length": 161}, RequestError, "--max-length 161 is outside 2..160, the bundle's"),
    ],
)
def test_what_can_not_be_is_refused(
    changes: dict[str, Any], error: type[SlipstreamError], message: str, bundle: Bundle
) -> None:
    with pytest.raises(error, match=message):
        build_engines(bundle, settings(**changes), SilentProgress())
    assert not (bundle.folder / "engines").exists()


def test_tensorrt_without_the_package_says_what_to_install(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'slipstream\[tensorrt\]'"):
        build_engines(bundle, settings(flavour="tensorrt", device=""), SilentProgress())


def test_a_tensorrt_without_cache_updates_is_refused(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        __version__ = "10.3.0"
        LayerType = object()

    monkeypatch.setitem(sys.modules, "tensorrt", Old)
    with pytest.raises(BackendError, match=r"tensorrt 10\.3\.0 has no KV cache update .* JetPack 7"):
        build_engines(bundle, settings(flavour="tensorrt", device=""), SilentProgress())


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), BackendError("no")])
def test_a_build_that_fails_leaves_nothing_half_written(
    failure: BaseException, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise failure

    monkeypatch.setattr(build_module, "_interruptible", fail)
    with pytest.raises(type(failure)):
        build_engines(bundle, settings(), SilentProgress())
    assert list((bundle.folder / "engines").iterdir()) == []
    assert {p.name for p in bundle.folder.iterdir()} == {*bundle.manifest.files, "manifest.json", "engines"}


def test_too_little_memory_is_refused_first(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", lambda _: 1)
    with pytest.raises(RequestError, match=r"building needs about .* MiB of memory"):
        build_engines(bundle, settings(), SilentProgress())


def test_the_command_shows_what_was_built(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["build", str(bundle.folder), "--engine", "tensorrt-rtx", "--device", "sm89", "--max-length", "100"]
    monkeypatch.setattr(sys, "argv", ["slipstream", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    shown = capsys.readouterr()
    assert "target.engine" in shown.out
    assert "taken apart" in shown.out
    assert "built" in shown.err
    record = json.loads((bundle.folder / "engines" / "tensorrt-rtx-sm89" / "record.json").read_text())
    assert record["parity"] == "unstamped"
