"""The same two ONNX files in ONNX Runtime and in TensorRT-RTX's parser and builder (no GPU needed)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest

from slipstream.engines.tensorrt_builder import Profile, engine_from_network, network_from_onnx
from slipstream.runtime.bundle import file_sha256, open_bundle
from slipstream.runtime.errors import BackendError

CAPACITY = {"sliding_capacity": 128, "full_capacity": 192}
PROFILE = Profile(
    {
        "batch": (1, 1, 2),
        "num_draft_tokens": (0, 4, 7),
        "num_scored_rows": (1, 5, 8),
        "num_drafted": (0, 0, 7),
    }
)


@pytest.fixture(scope="module")
def trt() -> Any:
    return pytest.importorskip("tensorrt_rtx", reason="pip install 'slipstream[tensorrt-rtx]'")


@pytest.mark.parametrize("name", ["edge", "dense"])
def test_both_graphs_load_in_onnx_runtime_and_build_in_tensorrt_rtx(
    name: str, trt: Any, bundle_folder: Callable[[str], Path]
) -> None:
    bundle = open_bundle(bundle_folder(name))
    for file in (bundle.manifest.target_graph, *(graph.file for graph in bundle.manifest.draft_graphs)):
        path = bundle.path(file)
        session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
        parsed = network_from_onnx(trt, path, CAPACITY)
        assert parsed.network.num_inputs == len(session.get_inputs())
        assert parsed.network.num_outputs == len(session.get_outputs())
        is_target = file == bundle.manifest.target_graph
        assert parsed.kv_updates == (2 * len(bundle.manifest.kv) if is_target else 0)
        assert len(engine_from_network(trt, parsed, PROFILE, "SM89")) > 100_000
        assert file_sha256(path) == bundle.manifest.files[file].sha256, "the graph must be left as it is"


def test_a_graph_that_can_not_be_parsed_is_named(trt: Any, bundle_folder: Callable[[str], Path]) -> None:
    path = bundle_folder("edge") / "target.onnx"
    with pytest.raises(BackendError, match=r"can't parse .*target\.onnx"):
        network_from_onnx(trt, path, {})  # dynamic capacity, which the cache update refuses
