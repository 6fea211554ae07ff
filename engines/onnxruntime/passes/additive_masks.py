"""A pass for ONNX Runtime: boolean attention masks become numbers to add, once per mask.

Its Attention turns a boolean mask into such numbers at every node; all layers of one type
share one mask, so the conversion is done once instead.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from slipstream.engines.graph_edit import constant, insert, operand


def add_masks(model: ir.Model) -> bool:
    """Convert the mask of every Attention; whether the model was changed.

    Before: masks are bool [B, 1, Q, S], true where a row is visible. After: they have the
    query's type, 0 where visible and the type's lowest number elsewhere, which keeps a row
    that sees nothing finite, as a boolean mask does.
    """
    graph = model.graph
    converted: dict[str, ir.Value] = {}
    for node in list(graph):
        if node.op_type != "Attention" or len(node.inputs) < 4 or operand(node, 3).dtype != ir.DataType.BOOL:
            continue
        mask = operand(node, 3)
        key = f"{mask.name}.additive"
        if key not in converted:
            converted[key] = _additive(graph, node, mask, key)
        node.replace_input_with(3, converted[key])
    return bool(converted)


def _additive(graph: ir.Graph, node: ir.Node, mask: ir.Value, name: str) -> ir.Value:
    dtype = operand(node, 0).dtype
    assert dtype is not None
    assert mask.shape is not None
    visible = constant(graph, f"mask.visible.{dtype.name}", np.zeros((), dtype.numpy()))
    lowest = np.array(np.finfo(dtype.numpy()).min, dtype.numpy())
    hidden = constant(graph, f"mask.hidden.{dtype.name}", lowest)
    return insert(node, "Where", [mask, visible, hidden], name, list(mask.shape), dtype)
