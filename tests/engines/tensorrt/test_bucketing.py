"""The bucket pass: same results, cost of the rows held, capacities static."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from slipstream.engines.tensorrt.passes.bucketing import attend_to_buckets
from slipstream.runtime.bundle.graph_io import ROWS_INPUT
from slipstream.runtime.bundle.manifest import Bundle, open_bundle
from slipstream.runtime.errors import BackendError
from tests.support.feeds import CAPACITY, feeds_of, without_roles


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


def test_a_graph_whose_attention_is_not_named_is_an_error(bundle: Bundle) -> None:
    model = without_roles(ir.load(bundle.path("assistant.onnx")))
    with pytest.raises(BackendError, match=r"no node whose slipstream\.role is cached_attention or shared_attention"):
        attend_to_buckets(model, bundle.manifest.kv, CAPACITY)
