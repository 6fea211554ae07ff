"""What the centroid head promises, counted in the exported draft graphs while they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from slipstream.runtime.bundle.graph_io import kv_name
from slipstream.runtime.bundle.manifest import Bundle, open_bundle
from tests.support.pairs import VOCAB_SIZE

Array = np.ndarray[Any, Any]

# the "edge" pair's assistant: 16 centroids of 24 tokens each, of which 3 are looked at
NUM_CENTROIDS, TOKENS_PER_CENTROID, TOP_K, WIDTH = 16, VOCAB_SIZE // 16, 3, 32
NUM_SCORED = TOP_K * TOKENS_PER_CENTROID
_SAME_VALUES = ("Transpose", "Reshape", "Unsqueeze", "Squeeze")


@dataclass
class Run:
    """A draft graph, and what each of its nodes gave in one call for one sequence."""

    graph: onnx.GraphProto
    values: dict[str, Array]

    def multiplied_rows(self) -> Iterator[int]:
        """Rows of each matrix that a draft step's last state is multiplied with to choose a token."""
        states = {node.output[0] for node in self.graph.node if list(node.input[1:]) == ["norm.weight"]}
        for node in self.graph.node:
            if node.op_type in _SAME_VALUES and node.input[0] in states:
                states.add(node.output[0])
            if node.op_type in ("MatMul", "Gemm") and states & {*node.input} and "post" not in node.input[1]:
                yield self.values[node.output[0]].size


def run(bundle: Bundle, num_steps: int) -> Run:
    file = next(graph.file for graph in bundle.manifest.draft_graphs if graph.num_steps == num_steps)
    model = onnx.load(bundle.path(file))
    graph = onnx.GraphProto()
    graph.CopyFrom(model.graph)
    names = [name for node in model.graph.node for name in node.output if name]
    del model.graph.output[:]
    model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in names)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL  # nodes as exported
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    given = _inputs(bundle)
    outputs = session.run(names, {node.name: given[node.name] for node in session.get_inputs()})
    return Run(graph, dict(zip(names, outputs, strict=True)))


def _inputs(bundle: Bundle) -> dict[str, Array]:
    random = np.random.default_rng(0)
    inputs: dict[str, Array] = {
        "token": np.array([[9]]),
        "draft": np.zeros((1, 0), np.int64),
        "hidden": random.standard_normal((1, 1, bundle.manifest.hidden_size), np.float32),
        "position": np.array([5]),
        "past_length": np.array([5]),
        "base": np.array([0]),
    }
    for buffer in bundle.manifest.kv:
        for part in ("key", "value"):
            shape = 1, buffer.num_kv_heads, 8, buffer.head_dim
            inputs[kv_name(buffer.layer, part)] = random.standard_normal(shape, np.float32)
    return inputs


@pytest.fixture(scope="module", params=[1, 3], ids=["1 step", "3 steps"])
def drafted(request: pytest.FixtureRequest, bundle_folder: Callable[[str], Any]) -> tuple[Run, int]:
    """A run of the "edge" pair's graph, and its number of steps."""
    return run(open_bundle(bundle_folder("edge")), request.param), request.param


def test_only_the_centroids_and_the_selected_rows_are_multiplied(drafted: tuple[Run, int]) -> None:
    done, num_steps = drafted
    assert list(done.multiplied_rows()) == [NUM_CENTROIDS, NUM_SCORED] * num_steps
    assert NUM_CENTROIDS + NUM_SCORED < VOCAB_SIZE / 4


def test_dense_head_multiplies_the_whole_vocabulary(bundle_folder: Callable[[str], Any]) -> None:
    """What the centroid head saves; and the count can tell."""
    assert list(run(open_bundle(bundle_folder("dense")), 1).multiplied_rows()) == [VOCAB_SIZE]


def test_nothing_of_the_vocabularys_size_is_computed(drafted: tuple[Run, int]) -> None:
    """Neither scores of all tokens, however they are folded, nor a copy of the table."""
    for name, value in drafted[0].values.items():
        runs = [prod(value.shape[i:j]) for i in range(value.ndim) for j in range(i + 1, value.ndim + 1)]
        assert VOCAB_SIZE not in runs, f"{name} has shape {value.shape}"
        assert value.size < VOCAB_SIZE * WIDTH, f"{name} has shape {value.shape}"


@pytest.mark.parametrize(("table", "block"), [("head.table", TOKENS_PER_CENTROID * WIDTH), ("head.tokens", 24)])
def test_what_a_centroid_needs_is_gathered_as_one_block(table: str, block: int, drafted: tuple[Run, int]) -> None:
    """From the stored tensor itself: a reshaped one would be a second copy of the table in memory."""
    done, num_steps = drafted
    stored = next(tensor for tensor in done.graph.initializer if tensor.name == table)
    assert (stored.dims[0], prod(stored.dims[1:])) == (NUM_CENTROIDS, block)
    readers = [node for node in done.graph.node if table in node.input]
    assert [node.op_type for node in readers] == ["Gather"] * num_steps
    assert all(attribute.i == 0 for node in readers for attribute in node.attribute if attribute.name == "axis")
    content = onnx.numpy_helper.to_array(stored)
    for node in readers:
        nearest = done.values[node.input[1]]
        assert nearest.shape == (1, TOP_K)
        assert np.array_equal(done.values[node.output[0]], content[nearest])


def test_drafted_token_is_the_best_of_the_selected_ones(drafted: tuple[Run, int]) -> None:
    done, num_steps = drafted
    gathered = [node for node in done.graph.node if "head.tokens" in node.input]
    drafts = done.values["next_draft"][0]
    for node, token in zip(gathered, drafts, strict=True):
        assert token in done.values[node.output[0]]
    assert len(drafts) == num_steps
