"""Half-precision graphs computed in float32: same inputs and outputs, rounding aside, weights left on disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from slipstream.engines.parity import compare as parity
from slipstream.engines.parity.compare import compare_engines
from slipstream.engines.parity.reference_graphs import ReferenceGraph, in_float32
from slipstream.engines.tensorrt.build import build_engines
from slipstream.runtime.bundle.dtypes import DType
from slipstream.runtime.bundle.engine_record import EngineSettings
from slipstream.runtime.bundle.files import file_sha256
from slipstream.runtime.bundle.manifest import Bundle, open_bundle
from tests.simulator.machine import install, simulate_builds
from tests.support.feeds import feeds_of
from tests.support.progress import SilentProgress

ROUNDING = {"bfloat16": 2**-8, "float16": 2**-11}  # of one value; layers add theirs up
GRAPHS = ["target.onnx", "assistant.onnx", "assistant_3_steps.onnx"]
HALVES: list[DType] = ["bfloat16", "float16"]


@pytest.fixture(scope="module")
def half_bundle(bundle_folder: Callable[..., Path]) -> Callable[[DType], Bundle]:
    return lambda dtype: open_bundle(bundle_folder("edge", dtype=dtype))


@pytest.mark.parametrize("file", GRAPHS)
@pytest.mark.parametrize("dtype", HALVES)
def test_a_half_graph_gives_what_the_float32_graph_gives(
    dtype: DType, file: str, half_bundle: Callable[[DType], Bundle], bundle_folder: Callable[[str], Path]
) -> None:
    exact = ReferenceGraph(open_bundle(bundle_folder("edge")), file)
    half = ReferenceGraph(half_bundle(dtype), file)
    for part in ("get_inputs", "get_outputs"):
        found, wanted = ([(v.name, v.type, v.shape) for v in getattr(g._session, part)()] for g in (half, exact))
        assert found == wanted
    feeds = feeds_of(exact._session, junk=1e4)
    expected, found_values = exact.run(feeds), half.run(feeds)
    allowed, compared = 16 * ROUNDING[dtype], 0
    for name, values in expected.items():
        difference = np.abs(found_values[name].astype(np.float32) - values)
        if name.startswith("next_kv.") or name == "next_hidden":
            shown = np.abs(values) < 1e3  # all but the junk
            assert float(difference[shown].max() / np.abs(values[shown]).max()) <= allowed, name
            compared += 1
        elif name in {"logits", "hidden", "draft_top_logits"}:  # of the first row: later ones have seen its errors
            assert float(difference[:, 0].max() / np.abs(values).max()) <= allowed, name
            compared += 1
    assert compared == (8 if file == "target.onnx" else 2)


@pytest.mark.parametrize("file", GRAPHS)
@pytest.mark.parametrize("dtype", HALVES)
def test_everything_between_is_float32_and_weights_stay_on_disk(
    dtype: DType, file: str, half_bundle: Callable[[DType], Bundle]
) -> None:
    bundle = half_bundle(dtype)
    model = ir.load(bundle.path(file))
    half = {ir.DataType.BFLOAT16, ir.DataType.FLOAT16}
    weights = {name: value.const_value for name, value in model.graph.initializers.items() if value.dtype in half}
    assert in_float32(model)
    values = [*model.graph.inputs, *(output for node in model.graph for output in node.outputs)]
    assert [value.name for value in values if value.dtype in half] == []
    for name, tensor in weights.items():
        value = model.graph.initializers[name]
        assert value.const_value is tensor, "a weight stays as it was"
        readers = [node.op_type for node, _ in value.uses()]
        assert readers == ["Cast"], f"{name} is read by {readers}"
    external = [tensor for tensor in weights.values() if isinstance(tensor, ir.ExternalTensor)]
    assert sum(tensor.nbytes for tensor in external) > 0.9 * sum(t.nbytes for t in weights.values() if t is not None)
    content = ir.to_proto(model).SerializeToString()
    assert len(content) < bundle.path(file).stat().st_size + 200 * len(weights), "the weights are not inside"
    assert file_sha256(bundle.path(file)) == bundle.manifest.files[file].sha256


@pytest.mark.parametrize("dtype", HALVES)
def test_a_second_run_changes_nothing(dtype: DType, half_bundle: Callable[[DType], Bundle]) -> None:
    model = ir.load(half_bundle(dtype).path("target.onnx"))
    assert in_float32(model)
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    assert not in_float32(model)
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


@pytest.mark.parametrize("file", GRAPHS)
def test_a_float32_graph_is_left_alone(file: str, bundle_folder: Callable[[str], Path]) -> None:
    model = ir.load(bundle_folder("edge") / file)
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    assert not in_float32(model)
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


def test_float16_engines_agree_with_it(
    half_bundle: Callable[[DType], Bundle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that must not be seen are large, but no product with them may overflow float16 before it is masked."""
    install(monkeypatch)
    simulate_builds(monkeypatch)
    monkeypatch.setitem(parity.TOLERANCE, "float16", 0.05)  # a random pair rounds worse than a trained one
    bundle = open_bundle(shutil.copytree(half_bundle("float16").folder, tmp_path / "bundle"))
    settings = EngineSettings(
        flavour="tensorrt-rtx", device="sm89", max_length=60, max_batch=1, num_draft_tokens=3, workspace_mib=64
    )
    build_engines(bundle, settings, SilentProgress())
    report = compare_engines(bundle, "tensorrt-rtx", SilentProgress())
    assert report.failures == []
    assert max(check.difference for check in report.calls) > 1e-6, "half precision is not what float32 is"
