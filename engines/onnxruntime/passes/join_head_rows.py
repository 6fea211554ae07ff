"""A pass for ONNX Runtime: over one KV head, query heads stay where the projection leaves them.

All query heads of one KV head can be rows of one matrix, in any order. Taken row by row, head
by head, the projection's result is that matrix already: nothing is transposed on the way into
the attention or out of it. For one thread only: see fold_query_heads on sharing out work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from slipstream.engines.graph_edit import insert, insert_split, integers, only_reader, operand, producer, size


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
    """
    chains = [chain for node in model.graph if (chain := _chain(node)) is not None]
    for chain in chains:
        _rewrite(model.graph, chain)
    return bool(chains)


def _chain(node: ir.Node) -> _Chain | None:
    if node.op_type != "Attention" or size(operand(node, 1), 1) != 1:
        return None
    num_heads, head_dim = size(operand(node, 0), 1), size(operand(node, 0), 3)
    rotary = producer(node, "RotaryEmbedding")
    norm = producer(rotary, "RMSNormalization")
    split = producer(norm, "Split")
    transpose = producer(split or norm, "Transpose")
    reshape = producer(transpose, "Reshape")
    back = only_reader(node, "Transpose")
    joined = only_reader(back, "Reshape")
    if None in (num_heads, head_dim, rotary, norm, transpose, reshape, back, joined) or num_heads == 1:
        return None
    if split is not None and [size(output, 1) for output in split.outputs[1:]] not in ([1], [1, 1]):
        return None
    return _Chain(reshape, transpose, split, norm, rotary, node, back, joined, num_heads, head_dim)  # type: ignore[arg-type]


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
