"""A pass for ONNX Runtime: the query heads of one KV head become rows of one matrix.

Its Attention multiplies head by head, which for G query heads over one KV head reads that
head's rows G times. As rows of one product they are read once. But it shares out work among
threads by head, so a group is folded only as far as every thread keeps a head of its own.
"""

from __future__ import annotations

import onnx_ir as ir

from slipstream.engines.graph_edit import insert, integers, operand, size, with_role
from slipstream.runtime.bundle.graph_roles import CACHED_ATTENTION, SHARED_ATTENTION


def fold_query_heads(model: ir.Model, num_threads: int) -> bool:
    """Fold groups of query heads; whether the model was changed. num_threads: that will run it.

    Before: query [B, H, Q, D] over key, value [B, Hkv, S, D], mask [B, 1, Q, S]. After, with F
    heads folded: query [B, H / F, F * Q, D] and the mask repeated to [B, 1, F * Q, S], one copy
    for all layers; the output is folded back. An Attention that can't gain is left alone.
    Raises BackendError where no node says that it is one.
    """
    is_changed = False
    for node in with_role(model.graph, SHARED_ATTENTION, CACHED_ATTENTION):
        if node.op_type == "Attention":  # others are fused
            num_heads, num_kv_heads = size(operand(node, 0), 1), size(operand(node, 1), 1)
            num_folded = num_heads // _heads_kept(num_heads, num_kv_heads, num_threads)
            if num_folded > 1:
                _fold(model.graph, node, num_heads, num_folded)
                is_changed = True
    return is_changed


def _heads_kept(num_heads: int, num_kv_heads: int, num_threads: int) -> int:
    """How many heads stay: the fewest that give every thread one, each a whole group or an equal part of one."""
    parts = [n for n in range(1, num_heads // num_kv_heads + 1) if num_heads // num_kv_heads % n == 0]
    return next((num_kv_heads * n for n in parts if num_kv_heads * n >= num_threads), num_heads)


def _fold(graph: ir.Graph, node: ir.Node, num_heads: int, num_folded: int) -> None:
    query, mask, output = operand(node, 0), operand(node, 3), node.outputs[0]
    assert query.shape is not None
    assert not output.is_graph_output()
    batch, _, _, head_dim = query.shape
    num_kept = num_heads // num_folded
    shape = [batch, num_kept, None, head_dim]
    dims = integers(graph, [0, num_kept, -1, int(str(head_dim))])
    node.replace_input_with(0, insert(node, "Reshape", [query, dims], f"{query.name}.folded", shape))
    node.replace_input_with(3, _repeated(graph, node, mask, num_folded))
    back = ir.Node("", "Reshape", [output, integers(graph, [0, num_heads, -1, int(str(head_dim))])])
    back.outputs[0].name, back.outputs[0].type = f"{output.name}.unfolded", output.type
    back.outputs[0].shape = output.shape
    output.shape = ir.Shape(shape)
    graph.insert_after(node, back)
    for reader, position in list(output.uses()):
        if reader is not back:
            reader.replace_input_with(position, back.outputs[0])


def _repeated(graph: ir.Graph, node: ir.Node, mask: ir.Value, times: int) -> ir.Value:
    """mask [B, 1, Q, S] -> [B, 1, times * Q, S], made once per mask."""
    name = f"{mask.name}.times_{times}"
    for reader, _ in mask.uses():
        if reader.outputs[0].name == name:
            return reader.outputs[0]
    assert mask.shape is not None
    shape = [mask.shape[0], 1, None, mask.shape[3]]
    return insert(node, "Tile", [mask, integers(graph, [1, 1, times, 1])], name, shape)
