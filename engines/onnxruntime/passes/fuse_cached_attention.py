"""A pass for ONNX Runtime: a layer's norms of heads, cache writes and attention in one chain of few nodes.

Between two matrices that come from memory, every node starts with cold caches and takes some
6 microseconds, however little it does. GroupQueryAttention writes new keys and values into the
buffers they are bound to, reads the rows held instead of the whole buffer, and takes and gives
rows as matrices do; nothing is transposed, and no mask is made. Needs ONNX Runtime 1.32.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    only_reader,
    operand,
    producer,
    size,
)

_FULL = -1  # GroupQueryAttention's window of an attention without one
_HEAD_STEP = 8  # it takes head sizes that are multiples of this


@dataclass(frozen=True)
class _Chain:
    """The nodes between a projection and its output projection, of a layer that owns KV.

    projected: [B, Q, heads * D]: queries, keys, and values unless they are the keys before their norm.
    angles: cos and sin, [B, Q, D / 2]. window: rows that are seen, or _FULL.
    """

    projected: ir.Value
    query_norm: ir.Node
    key_norm: ir.Node
    value_norm: ir.Node
    angles: tuple[ir.Value, ir.Value]
    key_scatter: ir.Node
    value_scatter: ir.Node
    attention: ir.Node
    joined: ir.Node
    window: int

    @property
    def num_heads(self) -> int:
        return _static(self.query_norm.outputs[0], 1)

    @property
    def num_kv_heads(self) -> int:
        return _static(self.key_norm.outputs[0], 1)

    @property
    def head_dim(self) -> int:
        return _static(self.query_norm.outputs[0], 3)

    @property
    def has_values(self) -> bool:
        """Whether values have columns of their own in the projection."""
        return operand(self.key_norm, 0) is not operand(self.value_norm, 0)


def fuse_cached_attention(model: ir.Model) -> bool:
    """Fuse every float32 attention over KV that its layer writes; whether the model was changed.

    Before: projected is reshaped and transposed to heads, split, normed and rotated; keys and values
    are scattered into their buffers, attended to with a boolean mask, and the result is transposed back.
    After: projected is normed and split as rows, rotated, and given to GroupQueryAttention.
    """
    chains = [chain for node in model.graph if (chain := _chain(node)) is not None]
    lengths: dict[ir.Value, tuple[ir.Value, ...]] = {}
    for chain in chains:
        _rewrite(model.graph, chain, lengths)
    if chains:
        model.graph.opset_imports[CONTRIB_DOMAIN] = 1
        RemoveUnusedNodesPass()(model)
    return bool(chains)


def _chain(node: ir.Node) -> _Chain | None:
    if node.op_type != "Attention" or operand(node, 0).dtype != ir.DataType.FLOAT:
        return None
    key_scatter, value_scatter = (producer(node, "TensorScatter", position) for position in (1, 2))
    query_rotary, key_rotary = producer(node, "RotaryEmbedding"), producer(key_scatter, "RotaryEmbedding", 1)
    query_norm, key_norm = (producer(rotary, "RMSNormalization") for rotary in (query_rotary, key_rotary))
    value_norm = producer(value_scatter, "RMSNormalization", 1)
    joined, window = only_reader(only_reader(node, "Transpose"), "Reshape"), _window(node)
    if not (key_scatter and value_scatter and query_rotary and key_rotary and joined) or window is None:
        return None
    if not (query_norm and key_norm and value_norm) or (_weight(value_norm) != 1).any():
        return None
    projected = _projected(query_norm, key_norm, value_norm)
    same_angles = query_rotary.inputs[1:] == key_rotary.inputs[1:]
    head_dim = size(query_norm.outputs[0], 3)
    epsilons = {norm.attributes["epsilon"].as_float() for norm in (query_norm, key_norm, value_norm)}
    if (
        projected is None
        or head_dim is None
        or head_dim % _HEAD_STEP
        or not same_angles
        or len(epsilons) > 1
        or key_scatter.inputs[2] is not value_scatter.inputs[2]
    ):
        return None
    angles = operand(query_rotary, 1), operand(query_rotary, 2)
    return _Chain(projected, query_norm, key_norm, value_norm, angles, key_scatter, value_scatter, node, joined, window)


def _window(attention: ir.Node) -> int | None:
    """Rows that the causal mask of the target lets through, _FULL where it has no window; None of other masks."""
    unsqueezed = producer(attention, "Unsqueeze", 3)
    if producer(unsqueezed, "LessOrEqual") is not None:
        return _FULL
    both = producer(unsqueezed, "And")
    start = producer(producer(both, "Greater", 1), "Sub", 1)
    if producer(both, "LessOrEqual") is None or start is None:
        return None
    window = operand(start, 1).const_value
    return None if window is None else int(window.numpy().item())


def _projected(query_norm: ir.Node, key_norm: ir.Node, value_norm: ir.Node) -> ir.Value | None:
    """What is split into the inputs of these norms, before its heads were taken apart."""
    split = producer(query_norm, "Split")
    reshape = producer(producer(split, "Transpose"), "Reshape")
    if split is None or reshape is None:
        return None
    query, key, value = (operand(norm, 0) for norm in (query_norm, key_norm, value_norm))
    is_in_order = list(split.outputs) == ([query, key] if key is value else [query, key, value])
    return operand(reshape, 0) if is_in_order else None


def _static(value: ir.Value, axis: int) -> int:
    found = size(value, axis)
    assert found is not None
    return found


def _weight(norm: ir.Node) -> NDArray[np.float32]:
    tensor = operand(norm, 1).const_value
    assert tensor is not None
    return tensor.numpy()


def _rewrite(graph: ir.Graph, chain: _Chain, lengths: dict[ir.Value, tuple[ir.Value, ...]]) -> None:
    attention, scatters = chain.attention, (chain.key_scatter, chain.value_scatter)
    start = operand(chain.key_scatter, 2)
    if start not in lengths:
        lengths[start] = _lengths(graph, attention, start, chain.projected)
    last, longest, num_rows = lengths[start]
    buffers = [operand(scatter, 0) for scatter in scatters]
    unused = [None] * 9  # rotary, bias, sink, scales and norms: not there, or done before
    attributes = {
        "num_heads": chain.num_heads,
        "kv_num_heads": chain.num_kv_heads,
        "scale": attention.attributes["scale"].as_float(),
        "local_window_size": chain.window,
    }
    fused = ir.Node(
        CONTRIB_DOMAIN,
        "GroupQueryAttention",
        [*_query_key_value(graph, chain), *buffers, last, longest, *unused, num_rows],
        ir.convenience.convert_attributes(attributes),
        num_outputs=3,
    )
    graph.insert_before(attention, fused)
    old = [chain.joined.outputs[0], *(scatter.outputs[0] for scatter in scatters)]
    unread = [chain.joined, *attention.outputs[0].consumers(), attention]
    ir.convenience.replace_nodes_and_values(graph, attention, unread, [], old, fused.outputs)


def _query_key_value(graph: ir.Graph, chain: _Chain) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Normed and rotated, [B, Q, heads * D] each."""
    attention, name = chain.attention, chain.attention.outputs[0].name
    heads, kv_heads, head_dim = chain.num_heads, chain.num_kv_heads, chain.head_dim
    normed, widths = _normed(graph, chain), [heads * head_dim, kv_heads * head_dim]
    if chain.has_values:
        turned, value = insert_split(attention, normed, [sum(widths), widths[1]], 2, [f"{name}.qk", f"{name}.v"])
        turned = _rotated(attention, turned, chain.angles, heads + kv_heads)
        query, key = insert_split(attention, turned, widths, 2, [f"{name}.q", f"{name}.k"])
        return query, key, value
    query, value = insert_split(attention, normed, widths, 2, [f"{name}.q", f"{name}.v"])
    weight = constant(graph, f"{name}.key_weight", np.tile(_weight(chain.key_norm), kv_heads))
    assert value.shape is not None
    key = insert(attention, "Mul", [value, weight], f"{name}.k", list(value.shape))
    query = _rotated(attention, query, chain.angles, heads)
    return query, _rotated(attention, key, chain.angles, kv_heads), value


def _normed(graph: ir.Graph, chain: _Chain) -> ir.Value:
    """projected with every head normed by one node; keys that are values without their weight."""
    attention, name = chain.attention, chain.attention.outputs[0].name
    kv_heads, head_dim = chain.num_kv_heads, chain.head_dim
    weights = [np.tile(_weight(chain.query_norm), (chain.num_heads, 1))]
    if chain.has_values:
        weights.append(np.tile(_weight(chain.key_norm), (kv_heads, 1)))
    weights.append(np.ones((kv_heads, head_dim), np.float32))
    weight = constant(graph, f"{name}.head_weights", np.concatenate(weights))
    assert chain.projected.shape is not None
    batch, rows, _ = chain.projected.shape
    num_heads = sum(map(len, weights))
    shape, epsilon = [batch, rows, num_heads, head_dim], chain.query_norm.attributes["epsilon"].as_float()
    to_heads, to_rows = (integers(graph, dims) for dims in ([0, 0, num_heads, head_dim], [0, 0, num_heads * head_dim]))
    heads = insert(attention, "Reshape", [chain.projected, to_heads], f"{name}.heads", shape)
    normed = insert(attention, "RMSNormalization", [heads, weight], f"{name}.normed", shape, axis=-1, epsilon=epsilon)
    return insert(attention, "Reshape", [normed, to_rows], f"{name}.rows", [batch, rows, num_heads * head_dim])


def _rotated(before: ir.Node, rows: ir.Value, angles: tuple[ir.Value, ir.Value], num_heads: int) -> ir.Value:
    assert rows.shape is not None
    shape, name = list(rows.shape), f"{rows.name}.rotated"
    return insert(before, "RotaryEmbedding", [rows, *angles], name, shape, num_heads=num_heads, interleaved=0)


def _lengths(graph: ir.Graph, before: ir.Node, start: ir.Value, projected: ir.Value) -> tuple[ir.Value, ...]:
    """Of the rows written from start [B] on: the last one's index [B], where the longest ends, their number [B]."""
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
