"""The pass over mixture-of-experts layers: the loop's values from one gather per call, and what memory it needs."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from slipstream.engines.tensorrt.passes.group_experts import experts_bytes, group_experts
from slipstream.export.model.moe import expand_experts
from slipstream.runtime.errors import BackendError

E, K, N, I = 12, 3, 8, 4  # noqa: E741 (experts, picks per row, width, inner width: the letters of the docstrings)
LAYER = """<ir_version: 11, opset_import: ["" : 24, "slipstream" : 1]>
tiny ({dtype}[T,{width}] rows, int64[T,{top_k}] chosen, {dtype}[T,{top_k}] shares,
      {dtype}[{count},{double},{width}] gate_up, {dtype}[{count},{width},{inner}] down) => ({dtype}[T,{width}] out)
{{
    out = slipstream.Experts(rows, chosen, shares, gate_up, down)
}}"""
OTHER_LOOP = """<ir_version: 11, opset_import: ["" : 24]>
tiny (float[n] x, int64 count) => (float[n] out)
{
    always = Constant<value = bool {1}>()
    out = Loop(count, always, x) <body = step (int64 i, bool go, float[n] y) => (bool on, float[n] z) {
        on = Identity(go)
        z = Add(y, y)
    }>
}"""


def looped(count: int = E, top_k: int = K, width: int = N, inner: int = I, dtype: str = "float") -> ir.Model:
    """A layer of experts as export writes it."""
    text = LAYER.format(count=count, top_k=top_k, width=width, inner=inner, double=2 * inner, dtype=dtype)
    model = ir.from_onnx_text(text)
    assert expand_experts(model)
    return model


def grouped() -> ir.Model:
    model = looped()
    assert group_experts(model)
    return model


def feeds_of(num_rows: int) -> dict[str, Any]:
    random = np.random.default_rng(num_rows)

    def values(*shape: int) -> Any:
        return random.standard_normal(shape, np.float32)

    chosen = np.stack([random.permutation(E)[:K] for _ in range(num_rows)])
    return {
        "rows": values(num_rows, N),
        "chosen": chosen,
        "shares": values(num_rows, K),
        "gate_up": values(E, 2 * I, N),
        "down": values(E, N, I),
    }


def run(model: ir.Model, feeds: dict[str, Any]) -> list[Any]:
    content = ir.to_proto(model).SerializeToString()
    session = ort.InferenceSession(content, providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds))


@pytest.mark.parametrize("num_rows", [1, 2, 4, 5, 40])
def test_a_call_gives_what_its_rows_give_one_by_one(num_rows: int) -> None:
    feeds = feeds_of(num_rows)
    np.testing.assert_allclose(run(grouped(), feeds)[0], run(looped(), feeds)[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize(("num_rows", "num_gathered"), [(1, 3), (2, 6), (4, 12), (40, 12)])
def test_no_more_experts_are_gathered_than_rows_can_pick(num_rows: int, num_gathered: int) -> None:
    model, feeds = grouped(), feeds_of(num_rows)
    gathers = [node for node in model.graph if node.op_type == "Gather"]
    assert [str(node.inputs[0] and node.inputs[0].name) for node in gathers] == ["gate_up", "down"]
    group = gathers[0].inputs[1]
    assert group is not None
    assert group is gathers[1].inputs[1]
    group.type, group.shape = ir.TensorType(ir.DataType.INT64), ir.Shape(["G"])
    model.graph.outputs.append(group)
    found = run(model, feeds)[1]
    assert len(found) == len(set(found)) == num_gathered
    assert set(found) >= set(feeds["chosen"].ravel())


def test_an_expert_overflows_for_the_rows_that_picked_it_only() -> None:
    feeds = feeds_of(3)
    feeds["chosen"] = np.array([[0, 1, 2], [1, 2, 3], [4, 5, 6]])
    feeds["rows"], feeds["gate_up"][0] = np.abs(feeds["rows"]), 3e38
    out = run(grouped(), feeds)[0]
    assert np.isfinite(out).all(axis=1).tolist() == [False, True, True]


def test_the_loop_and_what_counted_its_rows_are_gone_and_a_second_run_changes_nothing() -> None:
    model = grouped()
    kinds = [node.op_type for node in model.graph]
    assert not {"Loop", "If", "Squeeze"} & set(kinds)
    assert kinds.count("MatMul") == 2
    assert not any("always" in name for name in model.graph.initializers)
    assert (model.graph.outputs[0].dtype, str(model.graph.outputs[0].shape)) == (ir.DataType.FLOAT, "[T,8]")
    assert not group_experts(model)
    assert [node.op_type for node in model.graph] == kinds


def test_a_loop_of_another_kind_is_refused() -> None:
    model = ir.from_onnx_text(OTHER_LOOP)
    with pytest.raises(BackendError, match=r"no node whose slipstream\.role is experts\.rows: export the pair again"):
        group_experts(model)


def test_memory_is_that_of_the_experts_that_the_rows_can_pick() -> None:
    """Of 26B-A4B in bfloat16, against what TensorRT-RTX 1.7.1 planned for its layers: 103, 773, 1539 and 1665 MB."""
    model = looped(128, 8, 2816, 704, "bfloat16")
    needed = [experts_bytes(model, num_rows) / 1e6 for num_rows in (1, 8, 16, 256)]
    assert [round(megabytes) for megabytes in needed] == [95, 766, 1543, 1845]
