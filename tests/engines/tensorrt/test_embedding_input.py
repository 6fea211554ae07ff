"""The embedding as an input: fed with the bundle's table, both graphs give what the portable ones give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime as ort
import pytest

from slipstream.engines.tensorrt.builder import edited_model
from slipstream.engines.tensorrt.passes.embedding_input import embedding_as_input
from slipstream.runtime.bundle.graph_io import EMBEDDING_INPUT, ROWS_INPUT
from slipstream.runtime.bundle.manifest import Bundle, open_bundle
from slipstream.runtime.errors import BackendError
from tests.support.feeds import CAPACITY, feeds_of, without_roles

GRAPHS = ["target.onnx", "assistant.onnx", "assistant_3_steps.onnx"]


@pytest.fixture(scope="module")
def bundle(bundle_folder: Callable[[str], Path]) -> Bundle:
    return open_bundle(bundle_folder("edge"))


def table(bundle: Bundle) -> npt.NDArray[Any]:
    shape = bundle.manifest.vocab_size, bundle.manifest.hidden_size
    return np.fromfile(bundle.path(bundle.manifest.embedding_file), np.float32).reshape(shape)


def results(model: ir.Model | Path, bundle: Bundle, feeds: dict[str, Any]) -> dict[str, npt.NDArray[Any]]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(bundle.folder))
    content = model if isinstance(model, Path) else ir.to_proto(model).SerializeToString()
    session = ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_outputs()]
    known = {node.name for node in session.get_inputs()}
    values = session.run(names, {name: value for name, value in feeds.items() if name in known})
    return dict(zip(names, values, strict=True))


def feeds(bundle: Bundle, file: str) -> dict[str, Any]:
    session = ort.InferenceSession(bundle.path(file), providers=["CPUExecutionProvider"])
    return feeds_of(session, junk=1e4)


def locations(model: ir.Model) -> set[str]:
    tensors = [value.const_value for value in model.graph.initializers.values()]
    return {str(tensor.location) for tensor in tensors if isinstance(tensor, ir.ExternalTensor)}


@pytest.mark.parametrize("file", GRAPHS)
def test_fed_with_the_table_a_graph_gives_what_it_gave(bundle: Bundle, file: str) -> None:
    model = ir.load(bundle.path(file))
    assert embedding_as_input(model)
    given = feeds(bundle, file)
    expected = results(bundle.path(file), bundle, given)
    found = results(model, bundle, given | {EMBEDDING_INPUT: table(bundle)})
    assert list(found) == list(expected)
    for name, wanted in expected.items():
        np.testing.assert_allclose(found[name], wanted, rtol=0, atol=2e-5, err_msg=name)
    other = results(model, bundle, given | {EMBEDDING_INPUT: -table(bundle)})
    name = "hidden" if "hidden" in expected else "next_hidden"
    assert not np.allclose(other[name], expected[name]), "the table that is fed is the one that counts"


@pytest.mark.parametrize("file", GRAPHS)
def test_no_initializer_of_the_embedding_is_left(bundle: Bundle, file: str) -> None:
    model = ir.load(bundle.path(file))
    before = [value.name for value in model.graph.inputs]
    num_initializers = len(model.graph.initializers)
    assert bundle.manifest.embedding_file in locations(model)
    assert embedding_as_input(model)
    assert bundle.manifest.embedding_file not in locations(model)
    assert len(model.graph.initializers) == num_initializers - 1
    last = model.graph.inputs[-1]
    assert [value.name for value in model.graph.inputs] == [*before, EMBEDDING_INPUT]
    assert last.shape == [bundle.manifest.vocab_size, bundle.manifest.hidden_size]
    assert last.dtype == ir.DataType.FLOAT
    assert len(last.uses()) >= 1


@pytest.mark.parametrize("file", GRAPHS)
def test_a_second_run_changes_nothing(bundle: Bundle, file: str) -> None:
    model = ir.load(bundle.path(file))
    assert embedding_as_input(model)
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    assert not embedding_as_input(model)
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


def test_a_graph_whose_embedding_is_not_named_is_an_error(bundle: Bundle) -> None:
    model = without_roles(ir.load(bundle.path("target.onnx")))
    with pytest.raises(BackendError, match=r"no node whose slipstream\.role is embed: export the pair again"):
        embedding_as_input(model)


@pytest.mark.parametrize("file", GRAPHS)
def test_bucketed_and_fed_with_the_table_a_graph_gives_what_it_gave(bundle: Bundle, file: str) -> None:
    """Both passes, as a builder of engines gets them."""
    manifest = bundle.manifest
    model = edited_model(bundle.path(file), manifest.kv, CAPACITY)
    names = [str(value.name) for value in model.graph.inputs]
    assert names[-3:] == [*ROWS_INPUT.values(), EMBEDDING_INPUT]
    given = feeds(bundle, file)
    rows: dict[str, Any] = {name: np.arange(64) for name in ROWS_INPUT.values()}
    expected = results(bundle.path(file), bundle, given)
    found = results(model, bundle, given | rows | {EMBEDDING_INPUT: table(bundle)})
    for name, wanted in expected.items():
        np.testing.assert_allclose(found[name], wanted, rtol=0, atol=2e-5, err_msg=name)
