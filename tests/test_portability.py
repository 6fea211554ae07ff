"""The same two ONNX files in ONNX Runtime and in TensorRT-RTX's parser and builder (no GPU needed)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import onnxruntime as ort
import pytest

from slipstream.engines.tensorrt.builder import BuildOptions, edited_model, engine_from_network, network_from_onnx
from slipstream.runtime.bundle.files import file_sha256
from slipstream.runtime.bundle.manifest import Bundle, open_bundle
from slipstream.runtime.errors import BackendError
from slipstream.runtime.trt.flavour import TensorRT, load_flavour

CAPACITY = {"sliding": 128, "full": 192}
PROFILE = {
    "batch": (1, 1, 2),
    "num_draft_tokens": (0, 4, 7),
    "num_rows": (1, 5, 8),
    "num_scored_rows": (1, 5, 8),
    "num_drafted": (0, 0, 7),
    "sliding_bucket": (64, 128, 128),
    "full_bucket": (64, 128, 192),
}


@pytest.fixture(scope="module")
def trt() -> TensorRT:
    pytest.importorskip("tensorrt_rtx", reason="pip install 'slipstream[tensorrt-rtx]'")
    return load_flavour("tensorrt-rtx")


def edited(bundle: Bundle, path: Path) -> ir.Model:
    return edited_model(path, bundle.manifest.kv, CAPACITY)


def options(trt: TensorRT) -> BuildOptions:
    return BuildOptions(trt.module.ComputeCapability.SM89, 256, None)


@pytest.mark.parametrize("name", ["edge", "dense"])
def test_both_graphs_load_in_onnx_runtime_and_build_in_tensorrt_rtx(
    name: str, trt: TensorRT, bundle_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    bundle = open_bundle(bundle_folder(name))
    for file in (bundle.manifest.target_graph, *(graph.file for graph in bundle.manifest.draft_graphs)):
        path = bundle.path(file)
        session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
        parsed = network_from_onnx(trt, edited(bundle, path), path)
        assert parsed.network.num_inputs == len(session.get_inputs()) + 3, "two buckets and the embedding"
        assert parsed.network.num_outputs == len(session.get_outputs())
        assert len(engine_from_network(trt, parsed, [PROFILE], options(trt), lambda: True)) > 100_000
        assert file_sha256(path) == bundle.manifest.files[file].sha256, "the graph must be left as it is"
    assert {path.name for path in bundle.folder.iterdir()} == {*bundle.manifest.files, "manifest.json"}


def test_a_cancelled_build_is_an_error(trt: TensorRT, bundle_folder: Callable[[str], Path], tmp_path: Path) -> None:
    bundle = open_bundle(bundle_folder("edge"))
    path = bundle.path("assistant.onnx")
    parsed = network_from_onnx(trt, edited(bundle, path), path)
    with pytest.raises(BackendError, match="could not build the engine"):
        engine_from_network(trt, parsed, [PROFILE], options(trt), lambda: False)


def test_a_graph_that_can_not_be_parsed_is_named(
    trt: TensorRT, bundle_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    bundle = open_bundle(bundle_folder("edge"))
    with pytest.raises(BackendError, match=r"can't parse .*target\.onnx"):
        network_from_onnx(trt, ir.load(bundle.path("target.onnx")), bundle.path("target.onnx"))  # dynamic
