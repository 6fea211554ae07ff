"""The bucket pass: same results, cost of the rows held, capacities static."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from slipstream.engines.tensorrt.passes.bucketing import attend_to_buckets
from slipstream.runtime.bundle.graph_io import PER_LAYER_INPUT, ROWS_INPUT
from slipstream.runtime.bundle.manifest import Bundle, open_bundle

CAPACITY = {"sliding": 96, "full": 160}
NUM_HELD = 40


@pytest.fixture(scope="module")
def bundle(bundle_folder: Callable[[str], Path]) -> Bundle:
    return open_bundle(bundle_folder("edge"))


def bucketed(bundle: Bundle, file: str) -> tuple[ir.Model, ort.InferenceSession]:
    model = ir.load(bundle.path(file))
    assert attend_to_buckets(model, bundle.manifest.kv, CAPACITY)
    path = bundle.folder.parent / f"bucketed_{file}"
    for tensor in [v.const_value for v in model.graph.initializers.values()]:
        if isinstance(tensor, ir.ExternalTensor):
            tensor.base_dir = bundle.folder
    ir.save(model, path, external_data=f"{file}.data")
    return model, ort.InferenceSession(path, providers=["CPUExecutionProvider"])


def feeds_of(session: ort.InferenceSession, junk: float) -> dict[str, Any]:
    random = np.random.default_rng(0)
    feeds: dict[str, Any] = {
        "token": np.array([[40]]),
        "draft": np.array([[41, 42]]),
        "hidden": random.standard_normal((1, 1, 48)).astype(np.float32),
        "position": np.array([NUM_HELD]),
        "past_length": np.array([NUM_HELD]),
        "base": np.array([8]),
        "scored_rows": np.array([[0, 1, 2]]),
        "draft_length": np.array([2]),
    }
    for node in session.get_inputs():
        if node.name.startswith("kv."):
            kind = "sliding" if node.name.split(".")[1] in "01" else "full"
            shape = (1, node.shape[1], CAPACITY[kind], node.shape[3])
            feeds[node.name] = random.standard_normal(shape).astype(np.float32)
            feeds[node.name][:, :, NUM_HELD + 3 :] = junk
        elif node.name == PER_LAYER_INPUT:
            feeds[node.name] = 0.2 * random.standard_normal((1, 3, node.shape[2])).astype(np.float32)  # as a table's
    return feeds


@pytest.mark.parametrize("file", ["target.onnx", "assistant.onnx", "assistant_3_steps.onnx"])
@pytest.mark.parametrize("bucket", [48, 64, 96])
def test_a_bucket_of_the_rows_held_gives_what_the_whole_buffer_gives(bundle: Bundle, file: str, bucket: int) -> None:
    _, session = bucketed(bundle, file)
    whole = ort.InferenceSession(bundle.path(file), providers=["CPUExecutionProvider"])
    feeds = feeds_of(whole, junk=1e4)
    names = [node.name for node in whole.get_outputs()]
    known = {node.name for node in whole.get_inputs()}
    expected = whole.run(names, {name: value for name, value in feeds.items() if name in known})
    rows = {name: np.arange(bucket) for name in ROWS_INPUT.values()}
    found = session.run(names, {name: value for name, value in feeds.items() if name in known} | rows)
    for name, one, other in zip(names, expected, found, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-5, err_msg=name)


def test_capacities_become_static_and_every_attention_reads_a_bucket(bundle: Bundle) -> None:
    model, session = bucketed(bundle, "target.onnx")
    capacities = {node.shape[2] for node in session.get_inputs() if node.name.startswith("kv.")}
    assert capacities == set(CAPACITY.values())
    for node in model.graph:
        if node.op_type == "Attention":
            for position in (1, 2):
                value = node.inputs[position]
                producer = value.producer() if value is not None else None
                assert producer is not None
                assert producer.op_type == "Slice"


def test_a_second_run_changes_nothing(bundle: Bundle) -> None:
    model, _ = bucketed(bundle, "assistant.onnx")
    num_nodes = len(list(model.graph))
    assert not attend_to_buckets(model, bundle.manifest.kv, CAPACITY)
    assert len(list(model.graph)) == num_nodes
