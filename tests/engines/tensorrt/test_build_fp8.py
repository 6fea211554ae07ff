"""FP8 and NVFP4 bundles with TensorRT-RTX: they build, and engines keep the codes. No GPU ever ran one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from slipstream.engines.onnxruntime.build import build_onnxruntime
from slipstream.engines.tensorrt.build import build_engines
from slipstream.engines.tensorrt.builder import BuildOptions, edited_model, engine_from_network, network_from_onnx
from slipstream.export.checkpoint.opening import open_pair
from slipstream.export.checkpoint.quantization_config import Quantization
from slipstream.export.checkpoint.quantized import QuantizedCheckpoint, QuantizedHeader
from slipstream.export.model.graphs import TracedGraph
from slipstream.export.model.layers import Recipe
from slipstream.export.pair import export_pair
from slipstream.export.settings import ExportSettings
from slipstream.export.weights.stored_matrices import with_stored_matrices
from slipstream.runtime.bundle.engine_record import EngineSettings
from slipstream.runtime.bundle.manifest import Bundle, open_bundle
from slipstream.runtime.errors import BackendError, RequestError
from slipstream.runtime.ort.backend import OnnxRuntimeEngine
from slipstream.runtime.trt.flavour import load_flavour
from tests.support.fixtures import MadeOnce
from tests.support.progress import SilentProgress
from tests.support.quantized_pairs import make_small_pair

pytest.importorskip("tensorrt_rtx", reason="pip install 'slipstream[tensorrt-rtx]'")

_NUM_MATRICES = 8  # q+k+v, output, gate+up and down of two layers


@pytest.fixture
def stored_bundle(made_once: MadeOnce, tmp_path: Path) -> Callable[..., Bundle]:
    """A bfloat16 bundle of a two-layer pair whose target is quantized, to build in."""

    def get(kind: str) -> Bundle:
        def make(work: Path) -> None:
            make_small_pair(work, kind)
            pair = open_pair(work / "target", work / "assistant")
            export_pair(pair, work / "bundle", ExportSettings(dtype="bfloat16"), SilentProgress())

        return open_bundle(shutil.copytree(made_once(f"stored-half-{kind}", make) / "bundle", tmp_path / "bundle"))

    return get


def settings(device: str) -> EngineSettings:
    return EngineSettings(
        flavour="tensorrt-rtx", device=device, max_length=100, max_batch=1, num_draft_tokens=3, workspace_mib=256
    )


@pytest.mark.parametrize(("kind", "device"), [("fp8", "sm89"), ("fp8", "sm120"), ("nvfp4", "sm120")])
def test_a_quantized_pair_builds(stored_bundle: Callable[..., Bundle], kind: str, device: str) -> None:
    outcome = build_engines(stored_bundle(kind), settings(device), SilentProgress())
    assert outcome.is_new
    assert {"target.engine", "assistant.engine"} <= {path.name for path in outcome.folder.iterdir()}


@pytest.mark.parametrize(("kind", "codes"), [("fp8", "FP8"), ("nvfp4", "FP4")])
def test_the_network_has_every_matrix_in_codes(stored_bundle: Callable[..., Bundle], kind: str, codes: str) -> None:
    bundle, trt = stored_bundle(kind), load_flavour("tensorrt-rtx")
    manifest = bundle.manifest
    model = edited_model(bundle.path("target.onnx"), manifest.kv, {"sliding": 128, "full": 128})
    parsed = network_from_onnx(trt, model, bundle.path("target.onnx"))
    layers = [parsed.network.get_layer(i) for i in range(parsed.network.num_layers)]
    constants = [layer.get_output(0) for layer in layers if layer.type == trt.module.LayerType.CONSTANT]
    matrices = [c for c in constants if c.dtype == getattr(trt.module, codes.lower())]
    assert len(matrices) == _NUM_MATRICES


@pytest.mark.parametrize(
    ("kind", "device", "least"), [("fp8", "sm86", "sm89"), ("nvfp4", "sm89", "sm100"), ("nvfp4", "sm86", "sm100")]
)
def test_older_gpus_are_refused(stored_bundle: Callable[..., Bundle], kind: str, device: str, least: str) -> None:
    bundle = stored_bundle(kind)
    with pytest.raises(RequestError, match=rf"weights are {kind}, which GPUs multiply from {least} on"):
        build_engines(bundle, settings(device), SilentProgress())
    assert not (bundle.folder / "engines").exists()


def test_onnxruntime_is_refused_for_nvfp4(stored_bundle: Callable[..., Bundle]) -> None:
    bundle = stored_bundle("nvfp4")
    manifest = bundle.manifest.model_copy(update={"dtype": "float32"})
    float32 = Bundle(bundle.folder, manifest)
    with pytest.raises(BackendError, match="NVFP4, which ONNX Runtime has no kernels for"):
        OnnxRuntimeEngine(float32, num_threads=1)
    with pytest.raises(BackendError, match="NVFP4, which ONNX Runtime has no kernels for"):
        build_onnxruntime(float32, SilentProgress())


@pytest.mark.parametrize(
    ("quantization", "device", "bits"),
    [
        (Quantization("fp8", None), "sm89", 8),
        (Quantization("fp8", None), "sm120", 8),
        (Quantization("nvfp4", 16), "sm120", 4.5),
    ],
)
def test_an_engine_keeps_the_codes(quantization: Quantization, device: str, bits: float, tmp_path: Path) -> None:
    num_inputs, num_outputs = 1024, 1536
    trt = load_flavour("tensorrt-rtx")
    graph = _one_matrix(num_inputs, num_outputs, quantization, tmp_path)
    parsed = network_from_onnx(trt, graph.model, tmp_path / "one.onnx")
    capability = getattr(trt.module.ComputeCapability, device.upper())
    engine = engine_from_network(trt, parsed, [{"rows": (1, 1, 8)}], BuildOptions(capability, 64, None), lambda: True)
    stored = num_inputs * num_outputs * bits / 8
    assert stored < len(engine) < 1.2 * stored


def _one_matrix(num_inputs: int, num_outputs: int, quantization: Quantization, folder: Path) -> TracedGraph:
    """x [rows, K] times a bfloat16 matrix [K, N] that a checkpoint has quantized, with codes made up."""
    bfloat16 = ir.TensorType(ir.DataType.BFLOAT16)
    x = ir.Value(name="x", type=bfloat16, shape=ir.Shape(["rows", num_inputs]))
    weight = ir.Value(name="w", type=bfloat16, shape=ir.Shape([num_inputs, num_outputs]))
    node = ir.Node("", "MatMul", [x, weight])
    y = node.outputs[0]
    y.name, y.type, y.shape = "y", bfloat16, ir.Shape(["rows", num_outputs])
    graph = ir.Graph([x], [y], nodes=[node], initializers=[weight], opset_imports={"": 24}, name="one")
    recipe = Recipe(("m.weight",), "transposed", (num_inputs, num_outputs))
    header = QuantizedHeader((num_outputs, num_inputs), "", folder, "", {})
    checkpoint = QuantizedCheckpoint(folder, {}, {"m.weight": header}, quantization)
    made = with_stored_matrices(TracedGraph(ir.Model(graph, ir_version=11), {"w": recipe}), checkpoint)
    random = np.random.default_rng(0)
    for name, value in graph.initializers.items():
        assert value.dtype is not None
        assert value.shape is not None
        content = random.uniform(0.1, 6, [int(str(dim)) for dim in value.shape]).astype(value.dtype.numpy())
        value.const_value = ir.Tensor(content, dtype=value.dtype, name=name)
    return made
