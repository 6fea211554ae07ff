"""What needs a GPU: parity, stamp, copies, captured graphs, costs and memory, for whatever is installed there.

``make gpu-check`` runs the tests marked ``gpu`` and leaves ``gpu-check.json`` (or the file that
SLIPSTREAM_GPU_CHECK names). The test without the mark runs the same code through the simulator.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.runtime.bundle.dtypes import DType
from slipstream.runtime.bundle.engine_record import EngineName
from tests.simulator.machine import install, simulate_builds
from tests.support.gpu_check import ENGINES, Report, Scale, check_all, errors, reason_against

SCALE = Scale()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    out = Path(os.environ.get("SLIPSTREAM_GPU_CHECK", "gpu-check.json"))
    return check_all(tmp_path_factory.mktemp("gpu"), out, SCALE)


@pytest.fixture
def entry(engine: EngineName, dtype: DType, request: pytest.FixtureRequest) -> Report:
    """What was found of an engine; skips with the reason where it can't run."""
    reason = reason_against(engine)
    if reason is not None:
        pytest.skip(reason)
    found: Report = request.getfixturevalue("report")["engines"][engine][dtype]
    if "skipped" in found:
        pytest.skip(found["skipped"])
    return found


def check_entry(engine: str, dtype: str, entry: Report) -> None:
    """What must hold on every machine."""
    assert errors(entry) == []
    assert entry["steps"]["notes"] == []
    for costs in entry["steps"]["contexts"].values():
        for kind in ("plain", "round"):
            assert costs[kind]["copies"] <= 1, "what was decided, and nothing else"
            assert costs[kind]["is_captured"] is (None if engine == "onnxruntime-cuda" else True)
            assert costs[kind]["ms"] > 0
        assert min(costs["draft_ms"], costs["verify_ms"]) > 0
    if dtype == "float32":
        assert entry["greedy"]["is_identical"], entry["greedy"]["first_difference"]
    if engine != "onnxruntime-cuda":
        assert entry["parity"]["is_stamped"]
        assert entry["greedy"]["notes"] == []


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", SCALE.dtypes)
@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_agrees_is_captured_and_copies_what_was_decided_only(
    engine: EngineName, dtype: DType, entry: Report
) -> None:
    check_entry(engine, dtype, entry)


# the same through the simulator


@pytest.fixture
def folder(bundle_folder: Callable[..., Path], tmp_path: Path) -> Path:
    """Has the float32 bundle of the demo pair, which then needs no export."""
    shutil.copytree(bundle_folder("demo", ple="device"), tmp_path / "float32")
    return tmp_path


def small(**changes: Any) -> Scale:
    values: dict[str, Any] = {"dtypes": ("float32",), "contexts": (40,), "num_steps": 3, "num_tokens": 12}
    return Scale(**(values | {"max_length": 100, "max_batch": 1} | changes))


def test_the_check_of_engines_works_in_the_simulator(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulator = install(monkeypatch)
    simulate_builds(monkeypatch)
    out = folder / "gpu-check.json"
    scale = small(contexts=(40, 150), max_length=200, engines=("tensorrt-rtx", "tensorrt"))
    report = check_all(folder, out, scale)
    assert json.loads(out.read_text()) == json.loads(json.dumps(report))
    assert report["machine"]["device"] == "sm89"
    entry = report["engines"]["tensorrt-rtx"]["float32"]
    check_entry("tensorrt-rtx", "float32", entry)
    assert list(entry) == ["build", "loading", "parity", "greedy", "steps"]
    assert entry["parity"]["num_calls"] > 50
    assert entry["loading"]["runtime_cache_bytes"] > 0
    assert {costs[kind]["copies"] for costs in entry["steps"]["contexts"].values() for kind in ("plain", "round")} == {
        0
    }, "a captured graph holds its own"
    used = entry["steps"]["device_bytes"]
    assert 0 < used["loaded"] < used["one_sequence"]
    assert used["after_close"] == 0
    assert "pip install 'slipstream[tensorrt]'" in report["engines"]["tensorrt"]["float32"]["skipped"]
    simulator.check_closed()


def test_the_check_of_onnx_runtime_works_in_the_simulator(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulator = install(monkeypatch)
    simulator.onnxruntime_cuda(monkeypatch)
    report = check_all(folder, folder / "gpu-check.json", small(engines=("onnxruntime-cuda",)))
    entry = report["engines"]["onnxruntime-cuda"]["float32"]
    check_entry("onnxruntime-cuda", "float32", entry)
    assert list(entry) == ["greedy", "steps"]
    assert entry["steps"]["contexts"]["40"]["round"]["copies"] == 1
    simulator.check_closed()


def test_a_section_that_fails_hides_no_other(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulator = install(monkeypatch)
    simulate_builds(monkeypatch)

    def tamper(graph: str, outputs: Report) -> None:
        if graph == "target":
            outputs["logits"] += np.linspace(0, 9, outputs["logits"].shape[-1], dtype=np.float32)

    simulator.tamper = tamper
    report = check_all(folder, folder / "out.json", small(engines=("tensorrt-rtx",)))
    entry = report["engines"]["tensorrt-rtx"]["float32"]
    (error,) = errors(entry)
    assert "a logit differs" in error or "the reference's" in error
    assert entry["parity"]["is_stamped"] is False
    assert "no parity stamp" in entry["greedy"]["notes"][0]
    assert entry["steps"]["contexts"]["40"]["round"]["ms"] > 0


def test_what_does_not_fit_the_time_is_skipped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    report = check_all(folder, folder / "out.json", small(engines=("tensorrt-rtx",), num_tokens=1, budget_seconds=0))
    assert "0 are allowed" in report["engines"]["tensorrt-rtx"]["float32"]["skipped"]


def test_without_a_gpu_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, num_devices=0)
    reasons = {reason_against(engine) for engine in ENGINES}
    assert len(reasons) == 1
    assert "no CUDA-capable device is detected" in str(reasons)


def test_a_gpu_that_tensorrt_rtx_does_not_build_for_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, compute_capability="sm90")
    assert "sm90 is not a target of TensorRT-RTX" in str(reason_against("tensorrt-rtx"))
