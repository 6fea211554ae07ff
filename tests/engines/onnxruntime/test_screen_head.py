"""Heads that are screened: the exact logits and tokens of the whole head, from a few of its rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common
import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from slipstream.engines.onnxruntime.build import serialized
from slipstream.engines.onnxruntime.matrix_file import MatrixFile
from slipstream.engines.onnxruntime.passes import screen_head as pass_module
from slipstream.engines.onnxruntime.passes.screen_head import NUM_CANDIDATES, rounding_graph, screen_head
from slipstream.runtime.bundle.onnxruntime_record import WEIGHTS_FOLDER
from slipstream.runtime.ort.backend import multiplies_with_bytes

HEAD = """<ir_version: 11, opset_import: ["" : 24]>
head (float[batch,WIDTH] x) => (float[batch,TOP] logits, int64[batch,TOP] tokens)
    <int64[1] count = {TOP}, float[1] zero = {0}, int64[1] none = {0}>
{
    state = Add(x, zero)
    scored = Gemm<transB = 1>(state, table)
    values, positions = TopK<axis = -1>(scored, count)
    logits = Add(values, zero)
    tokens = Add(positions, none)
}"""
Table = NDArray[np.float32]


def head(folder: Path, table: Table, num_top: int = 8) -> ir.Model:
    """A graph that scores a table from a file."""
    table.tofile(folder / "head.bin")
    text = HEAD.replace("WIDTH", str(table.shape[1])).replace("TOP", str(num_top))
    model = ir.from_onnx_text(text.replace("int64[1] none", "float[1] table = {0}, int64[1] none"))
    tensor = ir.ExternalTensor(
        "head.bin", 0, table.nbytes, ir.DataType.FLOAT, shape=ir.Shape(table.shape), name="table", base_dir=folder
    )
    value = model.graph.initializers["table"]
    value.const_value, value.shape = tensor, tensor.shape
    return ir.passes.common.ShapeInferencePass()(model).model


def screened(folder: Path, model: ir.Model) -> bool:
    (folder / "screens.bin").unlink(missing_ok=True)
    return screen_head(model, MatrixFile(folder / "screens.bin"), 1)


def loaded(folder: Path, model: ir.Model) -> Callable[[Table], list[NDArray[np.float32]]]:
    options = ort.SessionOptions()
    options.add_session_config_entry(WEIGHTS_FOLDER, str(folder))
    session = ort.InferenceSession(serialized(model), options, providers=["CPUExecutionProvider"])
    return lambda state: session.run(None, {"x": state})


def check_same(folder: Path, table: Table, state: Table) -> None:
    model = head(folder, table)
    expected = loaded(folder, model)(state)
    assert screened(folder, model)
    logits, tokens = loaded(folder, model)(state)
    np.testing.assert_array_equal(tokens, expected[1])
    np.testing.assert_allclose(logits, expected[0], rtol=0, atol=2e-6 * np.abs(expected[0]).max())


def normal(seed: int, *shape: int) -> Table:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(("width", "block"), [(256, 32), (96, 32), (48, 16)])
def test_a_screened_head_computes_the_same(tmp_path: Path, width: int, block: int) -> None:
    table, state = normal(0, 4000, width), normal(1, 3, width)
    model = head(tmp_path, table)
    assert screened(tmp_path, model)
    found = [node.op_type for node in model.graph]
    assert "Gemm" not in found
    [rough] = [node for node in model.graph if node.op_type == "MatMulNBits"]
    numbers = {name: attribute.as_int() for name, attribute in rough.attributes.items()}
    assert numbers == {"K": width, "N": 4000, "bits": 8, "block_size": block, "accuracy_level": 4}
    [first, *_] = [node for node in model.graph if node.op_type == "TopK"]
    assert first.outputs[0].shape == ir.Shape(["batch", 64])  # what the margin of the pass was measured with
    num_scales = 4000 * width // block
    assert (tmp_path / "screens.bin").stat().st_size == -(-table.size // 4096) * 4096 + 4 * num_scales
    assert not screened(tmp_path, model)
    check_same(tmp_path, table, state)


def test_heads_of_several_strips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_module, "_STRIP_BYTES", 4 * 64 * 300)
    check_same(tmp_path, normal(8, 1000, 64), normal(9, 40, 64))


@pytest.mark.parametrize(("num_tokens", "width"), [(32768, 64), (262144, 32)])
def test_the_margin_of_rounding(tmp_path: Path, num_tokens: int, width: int) -> None:
    """How far the first token that is left out lies behind the last one that is wanted, against what rounding adds."""
    table, state = normal(10, num_tokens, width), normal(11, 8, width)
    exact = state @ table.T
    model = head(tmp_path, table)
    assert screened(tmp_path, model)
    rough_name = next(str(node.outputs[0].name) for node in model.graph if node.op_type == "MatMulNBits")
    rough_value = next(value for node in model.graph for value in node.outputs if value.name == rough_name)
    model.graph.outputs.append(rough_value)
    rough = loaded(tmp_path, model)(state)[2]
    error = (rough - exact).std(axis=1)
    ordered = np.sort(exact, axis=1)[:, ::-1]
    assert (error / exact.std(axis=1)).max() < 0.015
    assert ((ordered[:, 7] - ordered[:, NUM_CANDIDATES]) / error).min() > 50


@pytest.mark.parametrize("seed", range(2))
def test_the_best_token_is_found_beside_a_towering_channel(tmp_path: Path, seed: int) -> None:
    """It counts as much as any other, since the head's own values are as small there."""
    table, state = normal(seed, 32768, 256), normal(seed + 4, 8, 256)
    table[:, 5] /= 300
    state[:, 5] *= 300
    model = head(tmp_path, table)
    expected = loaded(tmp_path, model)(state)
    assert screened(tmp_path, model)
    logits, tokens = loaded(tmp_path, model)(state)
    np.testing.assert_array_equal(tokens[:, 0], expected[1][:, 0])
    np.testing.assert_allclose(logits[:, 0], expected[0][:, 0], rtol=1e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_state_that_is_not_finite_gives_tokens_of_the_vocabulary(tmp_path: Path, value: float) -> None:
    """The target's own row of such a state ends the round."""
    model, state = head(tmp_path, normal(12, 1000, 32)), normal(13, 2, 32)
    state[1, 3] = value
    assert screened(tmp_path, model)
    logits, tokens = loaded(tmp_path, model)(state)
    assert ((tokens >= 0) & (tokens < 1000)).all()
    assert np.isfinite(logits[0]).all()


def test_this_cpu_multiplies_with_bytes(tmp_path: Path) -> None:
    (tmp_path / "rounding.onnx").write_bytes(rounding_graph())
    assert multiplies_with_bytes(tmp_path / "rounding.onnx")


def test_a_cpu_that_restores_floats_is_told(tmp_path: Path) -> None:
    model = ir.serde.deserialize_model(onnx.load_from_string(rounding_graph()))
    next(iter(model.graph)).attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", 1)
    (tmp_path / "rounding.onnx").write_bytes(serialized(model))
    assert not multiplies_with_bytes(tmp_path / "rounding.onnx")
    (tmp_path / "rounding.onnx").write_bytes(b"no graph")
    assert not multiplies_with_bytes(tmp_path / "rounding.onnx")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32 - 1), scale=st.floats(1e-3, 1e3), outlier=st.sampled_from([1, 30, 1000]))
def test_channels_and_rows_of_any_size(tmp_path: Path, seed: int, scale: float, outlier: int) -> None:
    """One channel of the state and one row in eight stand out."""
    table, state = normal(seed, 2000, 64), normal(seed + 1, 2, 64)
    table[::8] *= np.float32(scale)
    state[:, 5] *= outlier
    check_same(tmp_path, table, state)


def test_of_equal_logits_the_smaller_id_wins(tmp_path: Path) -> None:
    """Every row stands in the table twice: near its start, and mirrored near its end."""
    half = normal(2, 1500, 64)
    check_same(tmp_path, np.concatenate([half, half[::-1]]), normal(3, 4, 64))


def test_rows_of_zeros_have_a_scale(tmp_path: Path) -> None:
    table = normal(4, 1000, 32)
    table[100:900] = 0
    check_same(tmp_path, table, normal(5, 2, 32))
    check_same(tmp_path, table, np.zeros((2, 32), np.float32))


def test_a_table_is_stored_once(tmp_path: Path) -> None:
    table, screens = normal(6, 500, 32), MatrixFile(tmp_path / "screens.bin")
    for _ in range(2):
        assert screen_head(head(tmp_path, table), screens, 1)
    assert screens.num_bytes == (tmp_path / "screens.bin").stat().st_size == 4 * 4096 + 4 * 500


@pytest.mark.parametrize(
    ("num_tokens", "width", "num_top", "least_bytes"),
    [
        (500, 40, 8, 1),  # no block of values divides the width
        (500, 32, 9, 1),  # more logits than the margin is for
        (NUM_CANDIDATES, 32, 8, 1),
        (500, 32, 8, 4 * 500 * 32 + 1),
    ],
)
def test_other_heads_are_left_alone(
    tmp_path: Path, num_tokens: int, width: int, num_top: int, least_bytes: int
) -> None:
    model = head(tmp_path, normal(7, num_tokens, width), num_top)
    before = [node.op_type for node in model.graph]
    assert not screen_head(model, MatrixFile(tmp_path / "screens.bin"), least_bytes)
    assert [node.op_type for node in model.graph] == before
    assert not (tmp_path / "screens.bin").exists()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("TopK<axis = -1>", "TopK<axis = -1, largest = 0>"),
        ("TopK<axis = -1>", "TopK<axis = 0>"),
        ("Gemm<transB = 1>", "Gemm<transB = 1, alpha = 2.0>"),
        ("int64[batch,TOP] tokens)", "int64[batch,TOP] positions)"),
        ("int64[batch,TOP] tokens)", "int64[batch,TOP] tokens, float[batch,500] scored)"),
    ],
)
def test_other_graphs_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str) -> None:
    monkeypatch.setitem(globals(), "HEAD", HEAD.replace(before, after))
    assert not screened(tmp_path, head(tmp_path, normal(7, 500, 32)))
