"""A pass for ONNX Runtime: a residual sum and the norm that reads it become one contrib node.

On narrow models the cost is the node, not its arithmetic. ONNX Runtime's fused kernel is the
slower one on wide rows, so those keep their two nodes.
"""

from __future__ import annotations

import onnx_ir as ir

from slipstream.engines.graph_edit import CONTRIB_DOMAIN, operand, size

WIDEST = 256  # from here on the two nodes are faster


def fuse_residual_norms(model: ir.Model) -> bool:
    """Fuse every Add -> RMSNormalization of narrow rows; whether the model was changed.

    Before: sum = Add(a, b) of equal shapes [B, Q, N], read by one RMSNormalization over N and
    by any others. After: SkipSimplifiedLayerNormalization gives both the norm and the sum.
    """
    graph = model.graph
    is_changed = False
    for node in list(graph):
        norm = _norm_of(node)
        if norm is not None:
            _fuse(graph, node, norm)
            is_changed = True
    if is_changed:
        graph.opset_imports[CONTRIB_DOMAIN] = 1
    return is_changed


def _norm_of(node: ir.Node) -> ir.Node | None:
    """The norm that a residual sum can be fused with."""
    if node.op_type != "Add" or node.outputs[0].is_graph_output():
        return None
    first, second = operand(node, 0).shape, operand(node, 1).shape
    if first is None or first != second or len(first) != 3:
        return None
    width = size(operand(node, 0), 2)
    if width is None or width > WIDEST:
        return None
    readers = [reader for reader, position in node.outputs[0].uses() if position == 0]
    norms = [reader for reader in readers if reader.op_type == "RMSNormalization"]
    return norms[0] if len(norms) == 1 and size(operand(norms[0], 1), 0) == width else None


def _fuse(graph: ir.Graph, node: ir.Node, norm: ir.Node) -> None:
    epsilon = norm.attributes["epsilon"].as_float()
    fused = ir.Node(
        CONTRIB_DOMAIN,
        "SkipSimplifiedLayerNormalization",
        [operand(node, 0), operand(node, 1), operand(norm, 1)],
        [ir.AttrFloat32("epsilon", epsilon)],
        num_outputs=4,
        name=f"{norm.outputs[0].name}.with_sum",
    )
    for unused in fused.outputs[1:3]:
        unused.name = ""
    ir.convenience.replace_nodes_and_values(
        graph,
        node,
        [node, norm],
        [fused],
        [norm.outputs[0], node.outputs[0]],
        [fused.outputs[0], fused.outputs[3]],
    )
