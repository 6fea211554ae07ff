"""The calibration run: float16 that overflows is found and named, int8 KV gets scales from what was seen."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from safetensors.torch import load_file, save_file

from slipstream.export.calibrate import calibration
from slipstream.export.calibrate.calibration import calibrate
from slipstream.export.calibrate.watch_float16 import LARGEST_OUTPUT, watch_float16
from slipstream.export.checkpoint.opening import open_pair
from slipstream.export.pair import export_pair
from slipstream.export.settings import ExportSettings
from slipstream.runtime.bundle.manifest import open_bundle
from slipstream.runtime.errors import CheckpointError
from slipstream.runtime.text.codec import TextCodec
from tests.support.progress import SilentProgress

PairFolder = Callable[[str], tuple[Path, Path]]


def scaled_pair(pair: tuple[Path, Path], folder: Path, factors: dict[str, float]) -> tuple[Path, Path]:
    """A copy whose weights of the target that end in a name are multiplied."""
    for source, name in zip(pair, ("target", "assistant"), strict=True):
        shutil.copytree(source, folder / name)
    for shard in (folder / "target").glob("*.safetensors"):
        tensors = load_file(shard)
        for name, tensor in tensors.items():
            for ending, factor in factors.items():
                if name.endswith(ending):
                    tensors[name] = (tensor.double() * factor).to(tensor.dtype)
        save_file(tensors, shard, {"format": "pt"})
    return folder / "target", folder / "assistant"


def test_float16_that_overflows_inside_the_graph_is_named_and_leaves_nothing(
    pair_folder: PairFolder, tmp_path: Path
) -> None:
    """The next weight brings the values back: on the CPU, which computes in float32, every output is finite."""
    factors = {"layers.1.mlp.up_proj.weight": 2e4, "layers.1.mlp.down_proj.weight": 0.5e-4}
    pair = scaled_pair(pair_folder("edge"), tmp_path / "pair", factors)
    out = tmp_path / "bundles" / "half"
    with pytest.raises(CheckpointError) as failure:
        export_pair(open_pair(*pair), out, ExportSettings("float16"), SilentProgress())
    message = str(failure.value)
    assert "at layers.1.mlp.gate_up.weight where float16 ends at 65504" in message
    assert "in tokens 0 to " in message
    assert message.startswith("target.onnx")
    assert message.endswith("export with --dtype bfloat16 or float32")
    assert not out.parent.exists()


def chain(*factors: float) -> ir.Model:
    """x [R, 2] float16 times diagonal matrices named w0.weight, w1.weight, ..."""
    value = ir.Value(name="x", shape=ir.Shape(["R", 2]), type=ir.TensorType(ir.DataType.FLOAT16))
    graph = ir.Graph([value], [], nodes=[], name="chain", opset_imports={"": 24})
    for number, factor in enumerate(factors):
        name = f"w{number}.weight"
        tensor = ir.tensor((np.eye(2) * factor).astype(np.float16), name=name)
        kind = ir.TensorType(ir.DataType.FLOAT16)
        weight = ir.Value(name=name, shape=ir.Shape([2, 2]), type=kind, const_value=tensor)
        graph.register_initializer(weight)
        node = ir.node("MatMul", [value, weight])
        value = node.outputs[0]
        value.name, value.shape, value.type = f"y{number}", ir.Shape(["R", 2]), kind
        graph.append(node)
    graph.outputs.append(value)
    return ir.Model(graph, ir_version=11)


def run(model: ir.Model, x: list[list[float]]) -> dict[str, Any]:
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_outputs()]
    return dict(zip(names, session.run(names, {"x": np.array(x, np.float16)}), strict=True))


def test_the_watch_sees_what_the_cpu_never_rounds() -> None:
    model = chain(4e4, 1e-4)
    assert watch_float16(model) == ["at w0.weight", "at w1.weight"]
    out = run(model, [[1, 2], [-4, 3]])
    assert np.isfinite(out["y1"]).all(), "the CPU keeps the overflow to itself"
    assert out[LARGEST_OUTPUT][0] > 65504
    assert out[LARGEST_OUTPUT][1] == pytest.approx(16, rel=1e-2)


def test_a_graph_without_float16_is_not_watched(bundle_folder: Callable[..., Path]) -> None:
    model = ir.load(bundle_folder("edge") / "target.onnx")
    before = len(list(model.graph))
    assert watch_float16(model) == []
    assert len(list(model.graph)) == before


def test_the_run_goes_beyond_the_window_and_sees_the_largest_rows(
    bundle_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = open_bundle(bundle_folder("edge"))
    monkeypatch.setattr(calibration, "_CHUNK", 32)
    codec = TextCodec(bundle.path("tokenizer.json"), bundle.manifest.generation.bos_token_id)
    whole = calibrate(bundle, codec)
    assert set(whole) == {buffer.layer for buffer in bundle.manifest.kv}
    assert len(calibration._tokens(bundle, codec)) > bundle.manifest.sliding_window + 32
    monkeypatch.setattr(calibration, "_CHUNK", 128)
    for layer, (key, value) in calibrate(bundle, codec).items():
        assert (key, value) == pytest.approx(whole[layer], rel=1e-4), "chunks must not matter"
        buffer = next(buffer for buffer in bundle.manifest.kv if buffer.layer == layer)
        assert 1 < value <= buffer.head_dim**0.5, "values are normed without a scale"


def test_bad_values_are_refused_in_float32_too(pair_folder: PairFolder, tmp_path: Path) -> None:
    """Weights that are finite, and a model that is not."""
    pair = scaled_pair(pair_folder("wrapped"), tmp_path / "pair", {"layers.2.mlp.down_proj.weight": 1e38})
    with pytest.raises(CheckpointError, match=r"NaN or infinity in \w+, in tokens 0 to \d+ of the calibration text"):
        export_pair(open_pair(*pair), tmp_path / "bundle", ExportSettings(kv="int8"), SilentProgress())
    assert not (tmp_path / "bundle").exists()


def test_half_bundles_that_pass_still_run_as_they_are(bundle_folder: Callable[..., Path]) -> None:
    folder = bundle_folder("edge", dtype="float16")
    names = [value.name for value in ir.load(folder / "target.onnx").graph.outputs]
    assert LARGEST_OUTPUT not in names
