"""A pass for ONNX Runtime: over one KV head, query heads stay where the projection leaves them.

All query heads of one KV head can be rows of one matrix, in any order. Taken row by row, head
by head, the projection's result is that matrix already: nothing is transposed on the way into
the attention or out of it. For one thread only: see fold_query_heads on sharing out work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from slipstream.engines.graph_edit import insert, insert_split, integers, operand, size, with_role
from slipstream.runtime.bundle.graph_roles import CACHED_ATTENTION, SHARED_ATTENTION


@dataclass(frozen=True)
class _Chain:
    """The nodes between a projection and its output projection. split: None where the layer owns no KV."""

    reshape: ir.Node
    transpose: ir.Node
    split: ir.Node | None
    norm: ir.Node
    rotary: ir.Node
    attention: ir.Node
    back: ir.Node
    joined: ir.Node
    num_heads: int
    head_dim: int


def join_head_rows(model: ir.Model) -> bool:
    """Rewrite every attention over one KV head; whether the model was changed.

    Before: projected [B, Q, heads * D] is reshaped, transposed to [B, heads, Q, D] and split into
    query, key and value; the query is normed, rotated, attends with mask [B, 1, Q, S], and is
    transposed and reshaped back. After: projected is split where it is and the query is
    [B, 1, Q * H, D], with cos, sin and the mask repeated for the heads of a row, made once.
    Raises BackendError where no node says that it is an attention.
    """
    attentions = [node for node in with_role(model.graph, SHARED_ATTENTION, CACHED_ATTENTION) if _can_join(node)]
    for node in attentions:
        _rewrite(model.graph, _chain(node))
    return bool(attentions)


def _can_join(node: ir.Node) -> bool:
    """Whether an attention is over one KV head and has heads to join; one that is fused has no op_type Attention."""
    return node.op_type == "Attention" and size(operand(node, 1), 1) == 1 and size(operand(node, 0), 1) > 1


def _made(node: ir.Node) -> ir.Node:
    """The node that makes the first input."""
    found = operand(node, 0).producer()
    assert found is not None, f"the first input of {node.name} is made by no node"
    return found


def _chain(attention: ir.Node) -> _Chain:
    rotary = _made(attention)
    norm = _made(rotary)
    split = _made(norm) if _made(norm).op_type == "Split" else None
    transpose = _made(split or norm)
    [back] = attention.outputs[0].consumers()
    [joined] = back.outputs[0].consumers()
    query = operand(attention, 0)
    num_heads, head_dim = size(query, 1), size(query, 3)
    return _Chain(_made(transpose), transpose, split, norm, rotary, attention, back, joined, num_heads, head_dim)


def _rewrite(graph: ir.Graph, chain: _Chain) -> None:
    heads, head_dim = chain.num_heads, chain.head_dim
    _place_rows(chain)
    for value in (chain.norm.outputs[0], chain.rotary.outputs[0], chain.attention.outputs[0]):
        assert value.shape is not None
        value.shape = ir.Shape([value.shape[0], 1, None, head_dim])
    for position in (1, 2):
        angles = operand(chain.rotary, position)
        chain.rotary.replace_input_with(position, _repeated_angles(graph, chain.rotary, angles, heads))
    mask = operand(chain.attention, 3)
    chain.attention.replace_input_with(3, _repeated_mask(graph, chain.attention, mask, heads))
    chain.joined.replace_input_with(0, chain.attention.outputs[0])
    chain.joined.replace_input_with(1, integers(graph, [0, -1, heads * head_dim]))
    unused = [chain.back, chain.split, chain.transpose, chain.reshape]
    graph.remove([node for node in unused if node is not None], safe=True)


def _place_rows(chain: _Chain) -> None:
    """Query, key and value [B, 1, rows, D] straight from the projection's [B, Q, heads * D]."""
    graph, start, heads, head_dim = chain.attention.graph, chain.reshape, chain.num_heads, chain.head_dim
    assert isinstance(graph, ir.Graph)
    projected = operand(start, 0)
    assert projected.shape is not None
    batch, rows, _ = projected.shape
    outputs = chain.transpose.outputs if chain.split is None else chain.split.outputs
    widths = [heads * head_dim, head_dim, head_dim][: len(outputs)]
    parts: Sequence[ir.Value] = [projected]
    if chain.split is not None:
        parts = insert_split(start, projected, widths, 2, [f"{output.name}.part" for output in outputs])
    dims = integers(graph, [0, 1, -1, head_dim])
    for part, output in zip(parts, outputs, strict=True):
        shape = [batch, 1, rows if output is not outputs[0] else None, head_dim]
        output.replace_all_uses_with(insert(start, "Reshape", [part, dims], f"{output.name}.rows", shape))


def _repeated_angles(graph: ir.Graph, before: ir.Node, angles: ir.Value, heads: int) -> ir.Value:
    """cos or sin [B, Q, D / 2] -> [B, Q * H, D / 2], made once per table."""
    name = f"{angles.name}.rows_{heads}"
    existing = _existing(angles, f"{name}.tiled")
    if existing is not None:
        return existing.consumers()[0].outputs[0]
    assert angles.shape is not None
    batch, rows, half = angles.shape
    width = int(str(half))
    tiled = insert(
        before, "Tile", [angles, integers(graph, [1, 1, heads])], f"{name}.tiled", [batch, rows, heads * width]
    )
    return insert(before, "Reshape", [tiled, integers(graph, [0, -1, width])], name, [batch, None, half])


def _repeated_mask(graph: ir.Graph, before: ir.Node, mask: ir.Value, heads: int) -> ir.Value:
    """mask [B, 1, Q, S] -> [B, 1, Q * H, S], each row H times in a row, made once per mask."""
    name = f"{mask.name}.rows_{heads}"
    existing = _existing(mask, f"{name}.apart")
    if existing is not None:
        return existing.consumers()[0].outputs[0].consumers()[0].outputs[0]
    assert mask.shape is not None
    batch, _, rows, capacity = mask.shape
    apart = insert(
        before, "Reshape", [mask, integers(graph, [0, -1, 1, 0])], f"{name}.apart", [batch, rows, 1, capacity]
    )
    tiled = insert(
        before, "Tile", [apart, integers(graph, [1, 1, heads, 1])], f"{name}.tiled", [batch, rows, heads, capacity]
    )
    return insert(before, "Reshape", [tiled, integers(graph, [0, 1, -1, 0])], name, [batch, 1, None, capacity])


def _existing(value: ir.Value, name: str) -> ir.Value | None:
    return next((reader.outputs[0] for reader in value.consumers() if reader.outputs[0].name == name), None)
