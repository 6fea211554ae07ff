"""The passes for ONNX Runtime: same results on tiny graphs and on a bundle's, and nothing to do a second time."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common
import onnxruntime as ort
import pytest

from slipstream.engines.onnxruntime.build import REWRITES, rewritten, serialized
from slipstream.engines.onnxruntime.filter_file import FilterFile, layout_graph
from slipstream.engines.onnxruntime.passes.add_masks import add_masks
from slipstream.engines.onnxruntime.passes.block_matrices import block_matrices
from slipstream.engines.onnxruntime.passes.fold_layer_scalars import fold_layer_scalars
from slipstream.engines.onnxruntime.passes.fold_query_heads import fold_query_heads
from slipstream.engines.onnxruntime.passes.fuse_cached_attention import fuse_cached_attention
from slipstream.engines.onnxruntime.passes.join_head_rows import join_head_rows
from slipstream.runtime.backend.per_layer_table import open_per_layer_table
from slipstream.runtime.bundle.graph_io import PER_LAYER_INPUT
from slipstream.runtime.bundle.graph_roles import LAYER, ROLE
from slipstream.runtime.bundle.manifest import Bundle, open_bundle
from slipstream.runtime.bundle.onnxruntime_record import WEIGHTS_FOLDER
from slipstream.runtime.errors import BackendError
from slipstream.runtime.ort.probes import channels_of_a_block
from tests.support.feeds import without_roles

KEY_NORM = "attention.key_norm"
Feeds = dict[str, np.ndarray[Any, Any]]

ATTENTION = """<ir_version: 11, opset_import: ["" : 24]>
tiny (float[b,4,q,8] query, float[b,2,s,8] key, float[b,2,s,8] value, bool[b,1,q,s] mask) => (float[b,4,q,8] out) {
    attended = Attention<scale = 1.0>(query, key, value, mask)
    out = Neg(attended)
}"""
ONE_KV_HEAD = """<ir_version: 11, opset_import: ["" : 24]>
tiny (float[b,q,48] x, float[b,q,4] cos, float[b,q,4] sin, float[b,1,s,8] key, float[b,1,s,8] value, bool[b,1,q,s] mask)
    => (float[b,q,32] out, float[b,1,q,8] new_key, float[b,1,q,8] new_value)
    <int64[4] to_heads = {0, 0, 6, 8}, int64[3] to_rows = {0, 0, 32}, int64[3] sizes = {4, 1, 1},
     float[8] scale = {1, 2, 3, 4, 5, 6, 7, 8}>
{
    apart = Reshape(x, to_heads)
    heads = Transpose<perm = [0, 2, 1, 3]>(apart)
    query, one, other = Split<axis = 1>(heads, sizes)
    normed = RMSNormalization<axis = -1, epsilon = 0.000001>(query, scale)
    rotated = RotaryEmbedding<interleaved = 0>(normed, cos, sin)
    attended = Attention<scale = 1.0>(rotated, key, value, mask)
    back = Transpose<perm = [0, 2, 1, 3]>(attended)
    out = Reshape(back, to_rows)
    new_key = Neg(one)
    new_value = Neg(other)
}"""
LAYERS = """<ir_version: 11, opset_import: ["" : 24]>
tiny (float[b,q,4] x, float[b,q,4] first, float[b,q,4] second)
    => (float[b,q,4] normed, float[b,q,2] product, float[b,q,4] negated)
    <float[4] weight = {1, 2, 3, 4}, float[1] scalar_1 = {0.25}, float[1] scalar_2 = {3.0},
     float[4,2] matrix = {1, 2, 3, 4, 5, 6, 7, 8}>
{
    first_normed = RMSNormalization<axis = -1, epsilon = 0.001>(first, weight)
    sum_1 = Add(x, first_normed)
    layer_1 = Mul(sum_1, scalar_1)
    product = MatMul(layer_1, matrix)
    second_normed = RMSNormalization<axis = -1, epsilon = 0.001>(second, weight)
    sum_2 = Add(layer_1, second_normed)
    layer_2 = Mul(sum_2, scalar_2)
    normed = RMSNormalization<axis = -1, epsilon = 0.1>(layer_2, weight)
    negated = Neg(layer_2)
}"""
SIZES = {"b": 2, "q": 3, "s": 7}


def tiny(text: str) -> ir.Model:
    """A model from text, with the shapes and roles that an exported graph has."""
    model = ir.passes.common.ShapeInferencePass()(ir.from_onnx_text(text)).model
    for node in model.graph:
        if node.op_type == "Attention":
            node.metadata_props[ROLE] = "shared_attention"
        if node.op_type == "Mul":
            node.metadata_props[ROLE] = "scalar"
    return model


def run(model: ir.Model, feeds: Feeds) -> list[np.ndarray[Any, Any]]:
    content = ir.serde.serialize_model(model).SerializeToString()
    results: list[np.ndarray[Any, Any]] = ort.InferenceSession(content, providers=["CPUExecutionProvider"]).run(
        None, feeds
    )
    return results


def tiny_feeds(model: ir.Model) -> Feeds:
    random, feeds = np.random.default_rng(0), Feeds()
    for value in model.graph.inputs:
        shape = [SIZES.get(str(dim)) or int(str(dim)) for dim in value.shape or []]
        feeds[str(value.name)] = random.standard_normal(shape).astype(np.float32)
    if "mask" in feeds:
        feeds["mask"] = feeds["mask"] > 0
        feeds["mask"][..., 0] = True
    return feeds


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def check_results(text: str, apply: Callable[[ir.Model], bool]) -> ir.Model:
    """The pass changes the model, and not its results."""
    model = tiny(text)
    feeds = tiny_feeds(model)
    expected = run(model, feeds)
    assert apply(model)
    for one, other in zip(expected, run(model, feeds), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    return model


def check_tiny(text: str, apply: Callable[[ir.Model], bool]) -> ir.Model:
    """As check_results, and a second time the pass changes nothing."""
    model = check_results(text, apply)
    before = operators(model)
    assert not apply(model)
    assert operators(model) == before
    return model


def test_one_mask_is_converted_once() -> None:
    shared = ATTENTION.replace("Neg(attended)", "Attention<scale = 1.0>(attended, key, value, mask)")
    assert operators(check_tiny(shared, add_masks)) == ["Where", "Attention", "Attention"]


def test_a_row_that_sees_nothing_stays_finite() -> None:
    model = tiny(ATTENTION)
    feeds = tiny_feeds(model)
    feeds["mask"][0, 0, 1] = False
    add_masks(model)
    assert np.isfinite(run(model, feeds)[0]).all()


def test_query_heads_of_a_group_become_rows() -> None:
    model = check_tiny(ATTENTION, lambda model: fold_query_heads(model, 1))
    assert operators(model) == ["Reshape", "Tile", "Attention", "Reshape", "Neg"]


@pytest.mark.parametrize(("num_threads", "num_heads"), [(1, 2), (2, 2), (3, 4), (16, 4)])
def test_threads_keep_a_head_each(num_threads: int, num_heads: int) -> None:
    model = tiny(ATTENTION)
    assert fold_query_heads(model, num_threads) == (num_heads < 4)
    query = next(node for node in model.graph if node.op_type == "Attention").inputs[0]
    assert query is not None
    assert query.shape is not None
    assert query.shape[1] == num_heads


def test_nothing_is_transposed_over_one_kv_head() -> None:
    found = operators(check_tiny(ONE_KV_HEAD, join_head_rows))
    assert "Transpose" not in found
    assert found.count("Attention") == 1


def test_several_kv_heads_are_left_as_they_are() -> None:
    assert not join_head_rows(tiny(ATTENTION))


def test_layer_scalars_move_into_what_reads_the_stream() -> None:
    model = check_results(LAYERS, fold_layer_scalars)
    assert operators(model).count("Mul") == 1  # for the reader that has no place for a factor
    assert "FusedMatMul" in operators(model)


def test_a_stream_far_from_its_scale_keeps_its_scalar() -> None:
    model = check_tiny(LAYERS.replace("scalar_2 = {3.0}", "scalar_2 = {0.0001}"), fold_layer_scalars)
    assert operators(model).count("Mul") == 1
    assert not fold_layer_scalars(tiny(LAYERS.replace("{0.25}", "{0.0}").replace("{3.0}", "{0.0}")))


@pytest.fixture(scope="module", params=["edge", "dense"])
def bundle(request: pytest.FixtureRequest, bundle_folder: Callable[[str], Path]) -> Bundle:
    return open_bundle(bundle_folder(request.param))


def session(bundle: Bundle, content: bytes) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 3  # it warns about KV that is not bound in place
    options.add_session_config_entry(WEIGHTS_FOLDER, str(bundle.folder))
    return ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module")
def portable(bundle: Bundle) -> dict[str, ort.InferenceSession]:
    graphs = [bundle.manifest.target_graph, *(graph.file for graph in bundle.manifest.draft_graphs)]
    return {graph: session(bundle, bundle.path(graph).read_bytes()) for graph in graphs}


@pytest.fixture(scope="module")
def feeds(bundle: Bundle, portable: dict[str, ort.InferenceSession]) -> Feeds:
    """Two sequences after a prefill, the second shortened again; junk where nothing is held."""
    random, vocab, held = np.random.default_rng(1), bundle.manifest.vocab_size, np.array([40, 25])
    target = portable[bundle.manifest.target_graph]
    prefill: Feeds = {
        "token": random.integers(6, vocab, (2, 1)),
        "draft": random.integers(6, vocab, (2, 39)),
        "past_length": np.zeros(2, np.int64),
        "base": np.zeros(2, np.int64),
        "scored_rows": np.array([[39], [39]]),
    }
    for node in target.get_inputs():
        if node.name.startswith("kv."):
            prefill[node.name] = np.full((2, node.shape[1], 64, node.shape[3]), 1e4, np.float32)
    prefill |= per_layer_rows(bundle, prefill)
    names = [node.name for node in target.get_outputs()]
    after = dict(zip(names, target.run(names, prefill), strict=True))
    kv = {name.removeprefix("next_"): content for name, content in after.items() if "kv." in name}
    following = {"token": after["logits"].argmax(axis=2), "draft": random.integers(6, vocab, (2, 2))}
    return {
        **kv,
        **following,
        **per_layer_rows(bundle, following),
        "hidden": after["hidden"][:, -1:],
        "position": held,
        "past_length": held,
        "base": np.array([3, 0]),
        "scored_rows": np.array([[0, 1, 2], [0, 1, 2]]),
    }


def per_layer_rows(bundle: Bundle, fed: Feeds) -> Feeds:
    """Of the tokens of a call, where the table is outside the graph."""
    table = open_per_layer_table(bundle)
    return {} if table is None else {PER_LAYER_INPUT: table.rows(np.concatenate([fed["token"], fed["draft"]], axis=1))}


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("rewrites", [*([name] for name in REWRITES), list(REWRITES)], ids="+".join)
@pytest.mark.parametrize("graph", ["target.onnx", "assistant.onnx", "assistant_3_steps.onnx"])
def test_a_bundle_computes_the_same(
    bundle: Bundle,
    portable: dict[str, ort.InferenceSession],
    feeds: Feeds,
    graph: str,
    rewrites: Sequence[str],
    num_threads: int,
) -> None:
    model, done = rewritten(bundle, graph, rewrites, num_threads)
    assert set(done) <= set(rewrites)
    check_same(bundle, portable[graph], session(bundle, serialized(model)), feeds)


@pytest.mark.parametrize("graph", ["target.onnx", "assistant.onnx", "assistant_3_steps.onnx"])
def test_convolutions_compute_the_same(
    bundle: Bundle, portable: dict[str, ort.InferenceSession], feeds: Feeds, graph: str, tmp_path: Path
) -> None:
    moved = open_bundle(shutil.copytree(bundle.folder, tmp_path / "bundle"))
    model, _ = rewritten(moved, graph, REWRITES, 1)
    (tmp_path / "layout.onnx").write_bytes(layout_graph())
    filters = FilterFile(moved.folder / "filters.bin", channels_of_a_block(tmp_path / "layout.onnx"))
    assert not block_matrices(model, filters, 2**40)
    assert block_matrices(model, filters, 1)
    found = operators(model)
    halves = [node.inputs[0] for node in model.graph if node.op_type == "Gelu"]
    num_gated = sum(half is not None and half.producer().op_type == "Split" for half in halves)  # type: ignore[union-attr]
    assert found.count("Conv") - found.count("ReorderInput") == num_gated > 0
    assert found.count("Conv") - found.count("ReorderOutput") == num_gated
    assert filters.num_bytes == (moved.folder / "filters.bin").stat().st_size
    check_same(bundle, portable[graph], session(moved, serialized(model)), feeds)


def check_same(bundle: Bundle, before: ort.InferenceSession, after: ort.InferenceSession, feeds: Feeds) -> None:
    for one, other in ((before.get_inputs(), after.get_inputs()), (before.get_outputs(), after.get_outputs())):
        assert [(node.name, node.type, node.shape) for node in one] == [(n.name, n.type, n.shape) for n in other]
    given = {node.name: feeds[node.name] for node in before.get_inputs()}
    names = [node.name for node in before.get_outputs()]
    results = [
        [written(bundle, given, name, content) for name, content in zip(names, of.run(names, given), strict=True)]
        for of in (before, after)
    ]
    for name, one, other in zip(names, *results, strict=True):
        if one.dtype == np.float32:
            np.testing.assert_allclose(one, other, rtol=0, atol=2e-5, err_msg=name)
        elif "top_tokens" not in name:  # further down, near-ties may swap places
            np.testing.assert_array_equal(one, other, err_msg=name)


def written(bundle: Bundle, fed: Feeds, name: str, content: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """An output; KV without the rows after the last one that each sequence holds, which nothing reads."""
    if "kv." not in name:
        return content
    layer = int(name.split(".")[1])
    is_sliding = next(buffer.type for buffer in bundle.manifest.kv if buffer.layer == layer) == "sliding"
    num_rows = fed["past_length"] - is_sliding * fed["base"] + fed["draft"].shape[1] + 1
    return np.where(np.arange(content.shape[2])[:, None] < num_rows[:, None, None, None], content, 0)


def test_every_layer_that_owns_kv_writes_and_attends_in_one_node(bundle: Bundle) -> None:
    model = ir.load(bundle.path(bundle.manifest.target_graph))
    windows = [bundle.manifest.sliding_window if buffer.type == "sliding" else -1 for buffer in bundle.manifest.kv]
    assert fuse_cached_attention(model)
    fused = [node for node in model.graph if node.op_type == "GroupQueryAttention"]
    assert [node.attributes["local_window_size"].as_int() for node in fused] == windows
    assert "TensorScatter" not in operators(model)


def test_a_pass_that_finds_no_role_is_an_error(bundle: Bundle) -> None:
    model = without_roles(ir.load(bundle.path(bundle.manifest.target_graph)))
    with pytest.raises(BackendError, match=r"no node whose slipstream\.role is cached_attention: export the pair"):
        fuse_cached_attention(model)
    with pytest.raises(BackendError, match=r"no node whose slipstream\.role is scalar: export the pair"):
        fold_layer_scalars(model)
    for apply in (add_masks, join_head_rows, lambda model: fold_query_heads(model, 1)):
        with pytest.raises(
            BackendError, match=r"no node whose slipstream\.role is shared_attention or cached_attention"
        ):
            apply(model)


def test_a_layer_without_one_of_its_nodes_is_an_error(bundle: Bundle) -> None:
    model = ir.load(bundle.path(bundle.manifest.target_graph))
    [norm] = [n for n in model.graph if (n.metadata_props.get(ROLE), n.metadata_props.get(LAYER)) == (KEY_NORM, "1")]
    norm.metadata_props.clear()
    with pytest.raises(BackendError, match=r"0 nodes of slipstream\.role attention\.key_norm and slipstream\.layer 1"):
        fuse_cached_attention(model)


def test_every_pass_has_something_to_do(bundle: Bundle) -> None:
    done = {
        name
        for graph in (bundle.manifest.target_graph, bundle.manifest.draft_graphs[0].file)
        for num_threads in (1, 2)
        for name in rewritten(bundle, graph, REWRITES, num_threads)[1]
    }
    has_one_kv_head = any(buffer.num_kv_heads == 1 for buffer in bundle.manifest.kv)
    assert done == set(REWRITES) - (set() if has_one_kv_head else {"join_head_rows"})
