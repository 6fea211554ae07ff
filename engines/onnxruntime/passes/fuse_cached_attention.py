"""A pass for ONNX Runtime: a layer's norms of heads, cache writes and attention in one chain of few nodes.

Between two matrices that come from memory, every node starts with cold caches and takes some
6 microseconds, however little it does. GroupQueryAttention writes new keys and values into the
buffers they are bound to, reads the rows held instead of the whole buffer, and takes and gives
rows as matrices do; nothing is transposed, and no mask is made. Needs ONNX Runtime 1.32.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from slipstream.engines.graph_edit import (
    CONTRIB_DOMAIN,
    constant,
    insert,
    insert_split,
    integers,
    operand,
    size,
    with_role,
    within_layer,
)
from slipstream.runtime.bundle.graph_roles import CACHED_ATTENTION, LAYER, WINDOW

_FULL = -1  # GroupQueryAttention's window of an attention without one
_HEAD_STEP = 8  # it takes head sizes that are multiples of this


@dataclass(frozen=True)
class _Layer:
    """The nodes between the projection of a layer that owns KV and its output projection.

    Fields but the first are named as roles are, below "attention.".
    project: gives [B, Q, heads * D]: queries, keys, and values unless they are the keys before their norm.
    """

    attention: ir.Node
    project: ir.Node
    query_norm: ir.Node
    key_norm: ir.Node
    value_norm: ir.Node
    query_rotary: ir.Node
    key_cache: ir.Node
    value_cache: ir.Node
    output: ir.Node

    @property
    def num_heads(self) -> int:
        return size(self.query_norm.outputs[0], 1)

    @property
    def num_kv_heads(self) -> int:
        return size(self.key_norm.outputs[0], 1)

    @property
    def head_dim(self) -> int:
        return size(self.query_norm.outputs[0], 3)

    @property
    def has_values(self) -> bool:
        """Whether values have columns of their own in the projection."""
        return operand(self.key_norm, 0) is not operand(self.value_norm, 0)


def fuse_cached_attention(model: ir.Model) -> bool:
    """Fuse the attention of every layer that owns KV in a float32 target; whether the model was changed.

    Before: projected is reshaped and transposed to heads, split, normed and rotated; keys and values
    are scattered into their buffers, attended to with a boolean mask, and the result is transposed back.
    After: projected is normed and split as rows, rotated, and given to GroupQueryAttention. It takes
    head sizes that are multiples of 8; layers of others stay as they are.
    Raises BackendError when no node says that it is such an attention.
    """
    graph, lengths, is_changed = model.graph, dict[ir.Value, tuple[ir.Value, ...]](), False
    for attention in with_role(graph, CACHED_ATTENTION):
        layer = _layer(graph, attention)
        if layer.head_dim % _HEAD_STEP == 0:
            _rewrite(graph, layer, lengths)
            is_changed = True
    if is_changed:
        graph.opset_imports[CONTRIB_DOMAIN] = 1
        RemoveUnusedNodesPass()(model)
    return is_changed


def _layer(graph: ir.Graph, attention: ir.Node) -> _Layer:
    layer, names = attention.metadata_props[LAYER], [field.name for field in fields(_Layer)[1:]]
    return _Layer(attention, *(within_layer(graph, layer, f"attention.{name}") for name in names))


def _weight(norm: ir.Node) -> NDArray[np.float32]:
    tensor = operand(norm, 1).const_value
    assert tensor is not None
    return tensor.numpy()


def _rewrite(graph: ir.Graph, layer: _Layer, lengths: dict[ir.Value, tuple[ir.Value, ...]]) -> None:
    """Fuse one layer. lengths: what _lengths gave, by the start of the rows, which layers of one type share."""
    attention, caches = layer.attention, (layer.key_cache, layer.value_cache)
    start = operand(layer.key_cache, 2)
    if start not in lengths:
        lengths[start] = _lengths(graph, attention, start, layer.project.outputs[0])
    last, longest, num_rows = lengths[start]
    buffers = [operand(cache, 0) for cache in caches]
    unused = [None] * 9  # rotary, bias, sink, scales and norms: not there, or done before
    attributes = {
        "num_heads": layer.num_heads,
        "kv_num_heads": layer.num_kv_heads,
        "scale": attention.attributes["scale"].as_float(),
        "local_window_size": int(attention.metadata_props.get(WINDOW, _FULL)),
    }
    fused = ir.Node(
        CONTRIB_DOMAIN,
        "GroupQueryAttention",
        [*_query_key_value(graph, layer), *buffers, last, longest, *unused, num_rows],
        ir.convenience.convert_attributes(attributes),
        num_outputs=3,
        metadata_props=attention.metadata_props,
    )
    graph.insert_before(attention, fused)
    rows, transposed = operand(layer.output, 0), attention.outputs[0].consumers()
    old = [rows, *(cache.outputs[0] for cache in caches)]
    unread = [*transposed[0].outputs[0].consumers(), *transposed, attention]
    ir.convenience.replace_nodes_and_values(graph, attention, unread, [], old, fused.outputs)


def _query_key_value(graph: ir.Graph, layer: _Layer) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Query, key and value, normed and rotated, [B, Q, heads * D] each."""
    attention, name = layer.attention, layer.attention.outputs[0].name
    heads, kv_heads, head_dim = layer.num_heads, layer.num_kv_heads, layer.head_dim
    angles = operand(layer.query_rotary, 1), operand(layer.query_rotary, 2)
    normed, widths = _normed(graph, layer), [heads * head_dim, kv_heads * head_dim]
    if layer.has_values:
        turned, value = insert_split(attention, normed, [sum(widths), widths[1]], 2, [f"{name}.qk", f"{name}.v"])
        turned = _rotated(attention, turned, angles, heads + kv_heads)
        query, key = insert_split(attention, turned, widths, 2, [f"{name}.q", f"{name}.k"])
        return query, key, value
    query, value = insert_split(attention, normed, widths, 2, [f"{name}.q", f"{name}.v"])
    weight = constant(graph, f"{name}.key_weight", np.tile(_weight(layer.key_norm), kv_heads))
    assert value.shape is not None
    key = insert(attention, "Mul", [value, weight], f"{name}.k", list(value.shape))
    query = _rotated(attention, query, angles, heads)
    return query, _rotated(attention, key, angles, kv_heads), value


def _normed(graph: ir.Graph, layer: _Layer) -> ir.Value:
    """The projection with every head normed by one node, [B, Q, heads * D]; keys that are values get no weight yet."""
    attention, name = layer.attention, layer.attention.outputs[0].name
    kv_heads, head_dim = layer.num_kv_heads, layer.head_dim
    weights = [np.tile(_weight(layer.query_norm), (layer.num_heads, 1))]
    if layer.has_values:
        weights.append(np.tile(_weight(layer.key_norm), (kv_heads, 1)))
    weights.append(np.ones((kv_heads, head_dim), np.float32))
    weight = constant(graph, f"{name}.head_weights", np.concatenate(weights))
    projected = layer.project.outputs[0]
    assert projected.shape is not None
    batch, rows, _ = projected.shape
    num_heads = sum(map(len, weights))
    shape, epsilon = [batch, rows, num_heads, head_dim], layer.query_norm.attributes["epsilon"].as_float()
    to_heads, to_rows = (integers(graph, dims) for dims in ([0, 0, num_heads, head_dim], [0, 0, num_heads * head_dim]))
    heads = insert(attention, "Reshape", [projected, to_heads], f"{name}.heads", shape)
    normed = insert(attention, "RMSNormalization", [heads, weight], f"{name}.normed", shape, axis=-1, epsilon=epsilon)
    return insert(attention, "Reshape", [normed, to_rows], f"{name}.rows", [batch, rows, num_heads * head_dim])


def _rotated(before: ir.Node, rows: ir.Value, angles: tuple[ir.Value, ir.Value], num_heads: int) -> ir.Value:
    assert rows.shape is not None
    shape, name = list(rows.shape), f"{rows.name}.rotated"
    return insert(before, "RotaryEmbedding", [rows, *angles], name, shape, num_heads=num_heads, interleaved=0)


def _lengths(graph: ir.Graph, before: ir.Node, start: ir.Value, projected: ir.Value) -> tuple[ir.Value, ...]:
    """What the operator asks for, int32, of rows that are written from start [B] on.

    Index of the last one [B], where the longest sequence ends [], how many there are [B].
    """
    name, int32, one = f"{start.name}.attended", ir.DataType.INT32, constant(graph, "int32.1", np.array([1], np.int32))
    assert start.shape is not None
    batch = list(start.shape)
    rows = insert(before, "Shape", [projected], f"{name}.num", [1], ir.DataType.INT64, start=1, end=2)
    rows = insert(before, "Cast", [rows], f"{name}.num.int32", [1], int32, to=int32)
    first = insert(before, "Cast", [start], f"{name}.first", batch, int32, to=int32)
    after = insert(before, "Add", [first, rows], f"{name}.after", batch)
    last = insert(before, "Sub", [after, one], f"{name}.last", batch)
    longest = insert(before, "ReduceMax", [after], f"{name}.longest", [], keepdims=0)
    return last, longest, insert(before, "Sub", [after, first], f"{name}.num_rows", batch)
